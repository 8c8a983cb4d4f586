"""What the prefill kernels share: how a program finds its chunk of which segment.

Segment ``n`` owns the chunk indices from ``cu_seqlens[n] // BT + n`` on. That bound grows by at least the number of
chunks of each segment and by at least 1, so chunk indices never collide, ``T // BT + N`` programs are enough, every
segment has a program even if it has no token, and nothing but ``cu_seqlens`` is needed to find it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_segment(cu_seqlens, num_segments, chunk, BT: tl.constexpr):
    """Index of the segment that owns ``chunk``: the number of first chunks at or before it, less one.

    cu_seqlens int32 ``[N + 1]``; chunk below ``T // BT + N``.
    """
    lanes = tl.arange(0, 128)
    before = 0
    for base in range(0, num_segments, 128):
        segment = base + lanes
        inside = segment < num_segments
        first = tl.load(cu_seqlens + segment, mask=inside, other=0) // BT + segment
        before += tl.sum((inside & (first <= chunk)).to(tl.int32), axis=0)
    return before - 1

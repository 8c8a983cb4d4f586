"""Host side of the kernels for sm_90: what runs in which launch, and how many programs each gets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ckpt_ops.chunked import CHUNK, MIN_LOG_GATE
from ckpt_ops.kernels.hopper_chain import hopper_chain_kernel
from ckpt_ops.kernels.hopper_intra import hopper_intra_kernel
from ckpt_ops.launcher import Launcher, is_aligned
from ckpt_ops.reference import NORM_EPS

_INTRA, _CHAIN = Launcher(hopper_intra_kernel), Launcher(hopper_chain_kernel)
_RECORD = 2 * CHUNK * CHUNK + 8 * CHUNK
"""Elements of one chunk and value head in the workspace: T, A, and four vectors in fp32."""
import os
SPLIT = lambda: int(os.environ.get("SPLIT", "0"))
ONLY = lambda: os.environ.get("ONLY")


def supports(q: Tensor, v: Tensor) -> bool:
    """Whether these kernels run such heads; the caller has checked that q's device is one of sm_90."""
    return q.dtype != torch.float32 and q.shape[2] in (64, 128) and v.shape[2] % 64 == 0


def aligned_rows(x: Tensor) -> Tensor:
    """``x`` with contiguous tokens that begin at multiples of 16 elements: itself if it is so, else a copy."""
    tokens = x.stride()[1:] == (x.shape[2], 1)
    return x if tokens and is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    phase_offsets: Sequence[int],
    scale: float,
    out: Tensor,
) -> None:
    """Run a packed forest into ``out``, on the current device."""
    q, k, v = aligned_rows(q), aligned_rows(k), aligned_rows(v)
    (tokens, heads_k, dim_k), (_, heads_v, dim_v) = q.shape, v.shape
    segments = sources.shape[0]
    chunks = tokens // CHUNK + segments
    records = q.new_empty(chunks * heads_v * _RECORD)
    dtypes = (q.dtype, g.dtype, beta.dtype, states.dtype)
    units = _multiprocessors(q.device)
    pair = int(os.environ.get("PAIR", 1))
    phases = [(first, last) for first, last in pairwise(phase_offsets) if last > first]
    split = SPLIT() and len(phases) > 1

    def intra(first: int, last: int, late: bool) -> None:
        if ONLY() == 'chain': return
        constants = (heads_k, heads_v, dim_k, CHUNK, pair, MIN_LOG_GATE, NORM_EPS, late)
        _INTRA(
            (heads_v // pair, chunks, 1),
            (dtypes, constants),
            (q, k, g, beta, cu_seqlens, records, segments, first, last, q.stride(0), k.stride(0), g.stride(0),
             beta.stride(0), scale, *constants),
            {"num_warps": 4, "maxnreg": 128 if pair == 1 else 232, "launch_pdl": late},
        )

    def chain(first: int, last: int) -> None:
        if ONLY() == 'intra': return
        count = last - first
        block_v = 64 if count * heads_v * (dim_v // 64) <= units or dim_v % 128 else 128
        block_v = int(os.environ.get("BV", block_v))
        items = count * heads_v * (dim_v // block_v)
        share = -(-items // units)
        constants = (heads_k, heads_v, dim_k, dim_v, block_v, CHUNK, 2)
        _CHAIN(
            (-(-items // share), 1, 1),
            (dtypes, constants),
            (q, k, v, out, cu_seqlens, states, sources, destinations, records, first, count, share, q.stride(0),
             k.stride(0), v.stride(0), *constants),
            {"num_warps": block_v // 16, "launch_pdl": True},
        )

    if split:
        intra(*phases[0], False)
        chain(*phases[0])
        intra(phases[1][0], segments, True)
        for phase in phases[1:]: chain(*phase)
    else:
        intra(0, segments, False)
        for phase in phases: chain(*phase)

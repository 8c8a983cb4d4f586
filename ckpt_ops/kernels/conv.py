"""Causal convolution over a packed forest, all phases in one launch.

A segment's history needs no other program's result: the last ``W - 1`` tokens before it are rows of ``x`` in its
ancestors, or columns of the slot that its root starts from. They are rounded to the pool's dtype as they would be had
they come through a slot. The program of a segment's first tile reads the history and alone writes the destination, so
source and destination may be the same slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt_ops.kernels.common import find_segment


@triton.jit
def load_history(
    x,
    cu_seqlens,
    states,
    sources,
    parents,
    x_stride,
    segment,
    length,
    channel,
    C: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
):
    """Tokens ``[BW, BC]`` at 1, 2, ... before position ``length`` of ``segment``, in the pool's dtype.

    Walks from the segment to its ancestors; lengths of 0 and 1 make the walk longer than one step.
    """
    back = tl.arange(0, BW) + 1
    wanted = back < W
    at = tl.zeros((BW,), tl.int32) + segment
    begin = tl.load(cu_seqlens + at)
    size = tl.zeros((BW,), tl.int32) + length
    parent = tl.load(parents + at)
    climb = wanted & (back > size) & (parent >= 0)
    while tl.max(climb.to(tl.int32), axis=0) > 0:
        back = tl.where(climb, back - size, back)
        at = tl.where(climb, parent, at)
        begin = tl.load(cu_seqlens + at, mask=climb, other=0) * climb.to(tl.int32) + tl.where(climb, 0, begin)
        size = tl.where(climb, tl.load(cu_seqlens + at + 1, mask=climb, other=0) - begin, size)
        parent = tl.load(parents + at)
        climb = climb & (back > size) & (parent >= 0)
    in_c = (channel < C)[None, :]
    in_x = wanted & (back <= size)
    row = (begin + size - back).to(tl.int64)
    tokens = tl.load(x + row[:, None] * x_stride + channel[None, :], mask=in_x[:, None] & in_c, other=0.0)
    slot = tl.load(sources + at).to(tl.int64)
    column = W - 1 - (back - size)
    in_pool = wanted & (back > size) & (slot >= 0)
    place = (slot[:, None] * C + channel[None, :]) * (W - 1) + column[:, None]
    held = tl.load(states + place, mask=in_pool[:, None] & in_c, other=0.0)
    return tl.where(in_x[:, None], tokens.to(tl.float32).to(states.dtype.element_ty), held)


@triton.jit(do_not_specialize=["num_segments"])
def conv_prefill_kernel(
    x,
    weight,
    bias,
    out,
    cu_seqlens,
    states,
    sources,
    destinations,
    parents,
    num_segments,
    x_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid ``(T // BT + N, cdiv(C, BC))``.

    Args:
        x: ``[T, C]``, token stride given; weight ``[C, W]`` and bias ``[C]`` contiguous; out ``[T, C]`` contiguous.
        cu_seqlens: int32 ``[N + 1]``; sources, destinations, parents: int32 ``[N]``.
        states: ``[num_slots, C, W - 1]`` contiguous, read and written.
        BW: power of two, at least W - 1; BT at least W - 1.
    """
    chunk = tl.program_id(0)
    segment = find_segment(cu_seqlens, num_segments, chunk, BT)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    base = (chunk - (start // BT + segment)) * BT
    if (base >= length) & (base > 0):
        return
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = channel < C
    lane = tl.arange(0, BT)
    back = tl.arange(0, BW) + 1
    history = tl.zeros((BW, BC), states.dtype.element_ty)
    if base == 0:
        history = load_history(x, cu_seqlens, states, sources, parents, x_stride, segment, 0, channel, C=C, W=W, BW=BW)
    result = tl.zeros((BT, BC), tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + channel, mask=in_c, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        position = base + lane - (W - 1) + tap
        row = (start + position).to(tl.int64)
        inside = ((position >= 0) & (position < length))[:, None] & in_c[None, :]
        token = tl.load(x + row[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        if base == 0:
            for steps in tl.static_range(1, W - tap):
                older = tl.sum(tl.where((back == steps)[:, None], history.to(tl.float32), 0.0), axis=0)
                token = tl.where((position == -steps)[:, None], older[None, :], token)
        result += token * tl.load(weight + channel * W + tap, mask=in_c, other=0.0).to(tl.float32)[None, :]
    if SILU:
        result = result * tl.sigmoid(result)
    row = (start + base + lane).to(tl.int64)
    inside = (base + lane < length)[:, None] & in_c[None, :]
    tl.store(out + row[:, None] * C + channel[None, :], result.to(out.dtype.element_ty), mask=inside)

    if base == 0:
        destination = tl.load(destinations + segment).to(tl.int64)
        if destination >= 0:
            final = load_history(
                x, cu_seqlens, states, sources, parents, x_stride, segment, length, channel, C=C, W=W, BW=BW
            )
            # In place, a column is written by another thread than the one that read it: reads first, then writes.
            tl.debug_barrier()
            place = (destination * C + channel[None, :]) * (W - 1) + (W - 1 - back)[:, None]
            tl.store(states + place, final, mask=(back < W)[:, None] & in_c[None, :])

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
from ckpt_ops.kernels.gates import store_gates


@triton.jit
def load_earlier(
    x,
    cu_seqlens,
    states,
    sources,
    parents,
    x_stride,
    segment,
    position,
    channel,
    C: tl.constexpr,
    W: tl.constexpr,
):
    """The token ``[BC]`` at ``position`` of ``segment``, in the pool's dtype; positions below 0 lie in its ancestors,
    or in the slot of its root.

    The walk takes more than one step where ancestors are shorter than the history.
    """
    start = tl.load(cu_seqlens + segment)
    parent = tl.load(parents + segment)
    while (position < 0) & (parent >= 0):
        segment = parent
        start = tl.load(cu_seqlens + segment)
        position += tl.load(cu_seqlens + segment + 1) - start
        parent = tl.load(parents + segment)
    in_batch = channel < tl.where(position >= 0, C, 0)
    token = tl.load(x + (start + position).to(tl.int64) * x_stride + channel, mask=in_batch, other=0.0)
    slot = tl.load(sources + segment).to(tl.int64)
    in_pool = channel < tl.where((position < 0) & (slot >= 0), C, 0)
    held = tl.load(states + (slot * C + channel) * (W - 1) + (W - 1 + position), mask=in_pool, other=0.0)
    return tl.where(position >= 0, token.to(tl.float32).to(states.dtype.element_ty), held)


@triton.jit
def load_taps(weight, channel, in_c, W: tl.constexpr, PACKED: tl.constexpr):
    """The ``W`` columns ``[BC]`` of ``weight``, fp32. PACKED: 4 taps of 2 bytes, read as one word a channel."""
    taps = ()
    if PACKED:
        words = tl.load(weight.to(tl.pointer_type(tl.int64)) + channel, mask=in_c, other=0)
        for i in tl.static_range(W):
            bits = ((words >> (16 * i)) & 0xFFFF).to(tl.uint16)
            taps = taps + (bits.to(weight.dtype.element_ty, bitcast=True).to(tl.float32),)
    else:
        for i in tl.static_range(W):
            taps = taps + (tl.load(weight + channel * W + i, mask=in_c, other=0.0).to(tl.float32),)
    return taps


# Tensors in the list are read one element a thread, so their alignment makes no other code.
@triton.jit(
    do_not_specialize=["cu_seqlens", "sources", "destinations", "parents"]
    + ["a", "b", "a_log", "dt_bias", "num_segments", "a_stride", "b_stride"]
)
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
    a,
    b,
    a_log,
    dt_bias,
    g,
    beta,
    num_segments,
    x_stride,
    a_stride,
    b_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    HV: tl.constexpr,
    BH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid ``(T // BT + N, cdiv(C, BC))``. Each thread keeps the last ``W - 1`` tokens of its channels in registers, so
    that a token is loaded once.

    Args:
        x: ``[T, C]``, token stride given; weight ``[C, W]`` and bias ``[C]`` contiguous; out ``[T, C]`` contiguous.
        cu_seqlens: int32 ``[N + 1]``; sources, destinations, parents: int32 ``[N]``.
        states: ``[num_slots, C, W - 1]`` contiguous, read and written.
        a, b: ``[T, HV]``, token strides given; a_log, dt_bias: ``[HV]``; g fp32 and beta: ``[T, HV]`` contiguous,
            written. Not touched if HV is 0.
        BT: at least W - 1. PACKED: see ``load_taps``.
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
    at = x + (start + base).to(tl.int64) * x_stride + channel
    tokens = ()
    for i in tl.static_range(BT):
        tokens = tokens + (tl.load(at + i * x_stride, mask=channel < tl.where(base + i < length, C, 0), other=0.0),)
    window = ()
    for i in tl.static_range(W - 1):
        older = tl.zeros((BC,), tl.float32)
        if base == 0:
            older = load_earlier(
                x, cu_seqlens, states, sources, parents, x_stride, segment, base + i - (W - 1), channel, C=C, W=W
            ).to(tl.float32)
        near = tl.load(at + (i - (W - 1)) * x_stride, mask=channel < tl.where(base > 0, C, 0), other=0.0)
        window = window + (tl.where(base > 0, near.to(tl.float32), older),)
    taps = load_taps(weight, channel, in_c, W=W, PACKED=PACKED)
    offset = tl.zeros((BC,), tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + channel, mask=in_c, other=0.0).to(tl.float32)
    target = out + (start + base).to(tl.int64) * C + channel
    for i in tl.static_range(BT):
        window = window + (tokens[i].to(tl.float32),)
        result = offset
        for tap in tl.static_range(W):
            result += window[i + tap] * taps[tap]
        if SILU:
            result = result * tl.sigmoid(result)
        tl.store(target + i * C, result.to(out.dtype.element_ty), mask=channel < tl.where(base + i < length, C, 0))
    if HV > 0:
        if tl.program_id(1) == 0:
            store_gates(
                a, b, a_log, dt_bias, g, beta, start + base, length - base, a_stride, b_stride, HV=HV, BH=BH, BT=BT
            )

    if base == 0:
        destination = tl.load(destinations + segment).to(tl.int64)
        if destination >= 0:
            final = ()
            for i in tl.static_range(W - 1):
                position = length + (i - (W - 1))
                final = final + (
                    load_earlier(
                        x, cu_seqlens, states, sources, parents, x_stride, segment, position, channel, C=C, W=W
                    ),
                )
            # In place, a column is written by another thread than the one that read it: reads first, then writes.
            tl.debug_barrier()
            for i in tl.static_range(W - 1):
                tl.store(states + (destination * C + channel) * (W - 1) + i, final[i], mask=in_c)

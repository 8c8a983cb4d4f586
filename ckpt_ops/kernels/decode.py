"""One token for each running sequence: the recurrence and the convolution, states in place in their slots."""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt_ops.kernels.gates import store_gates


# Tensors in the lists are read one element a thread, so their alignment makes no other code.
@triton.jit(do_not_specialize=["g", "beta", "slots", "g_stride", "beta_stride"])
def gdn_decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    out,
    states,
    slots,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORM_EPS: tl.constexpr,
):
    """Eq. 10 of arXiv 2412.06464. Grid ``(B, H_v, cdiv(D_v, BV))``.

    Args:
        q, k: ``[B, H_k, D_k]``; v: ``[B, H_v, D_v]``; g, beta: ``[B, H_v]``; row strides given.
        out: ``[B, H_v, D_v]`` contiguous, written.
        states: ``[num_slots, H_v, D_k, D_v]`` contiguous, read and written.
        slots: int32 ``[B]``; -1: a zero row is written to ``out`` and no state is touched.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    dim_v = tl.program_id(2) * BV + tl.arange(0, BV)
    in_v = dim_v < DV
    target = out + (row * HV + head) * DV + dim_v
    if slot < 0:
        tl.store(target, tl.zeros((BV,), out.dtype.element_ty), mask=in_v)
        return
    dim_k = tl.arange(0, BK)
    in_k = dim_k < DK
    inside = in_k[:, None] & in_v[None, :]
    place = states + (slot * HV + head) * (DK * DV) + dim_k[:, None] * DV + dim_v[None, :]
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    key_head = head // (HV // HK)
    key = tl.load(k + row * k_stride + key_head * DK + dim_k, mask=in_k, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_stride + key_head * DK + dim_k, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + row * v_stride + head * DV + dim_v, mask=in_v, other=0.0).to(tl.float32)
    gate = tl.load(g + row * g_stride + head).to(tl.float32)
    strength = tl.load(beta + row * beta_stride + head).to(tl.float32)

    key = key * tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
    query = query * (tl.rsqrt(tl.sum(query * query, axis=0) + NORM_EPS) * scale)
    state = state * tl.exp(gate)
    error = strength * (value - tl.sum(key[:, None] * state, axis=0))
    state += key[:, None] * error[None, :]
    result = tl.sum(query[:, None] * state, axis=0)
    tl.store(place, state.to(states.dtype.element_ty), mask=inside)
    tl.store(target, result.to(out.dtype.element_ty), mask=in_v)


@triton.jit(do_not_specialize=["slots", "a", "b", "a_log", "dt_bias", "a_stride", "b_stride"])
def conv_decode_kernel(
    x,
    weight,
    bias,
    out,
    states,
    slots,
    a,
    b,
    a_log,
    dt_bias,
    g,
    beta,
    x_stride,
    a_stride,
    b_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
    HV: tl.constexpr,
    BH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid ``(B, cdiv(C, BC))``.

    Args:
        x: ``[B, C]``, row stride given; weight: ``[C, W]`` and bias ``[C]`` contiguous; out: ``[B, C]`` contiguous.
        states: ``[num_slots, C, W - 1]`` contiguous, read and written.
        slots: int32 ``[B]``; -1: a zero row is written to ``out`` and no state is touched.
        a, b, a_log, dt_bias, g, beta: as in ``conv_prefill_kernel``, with B rows, for slots of -1 too.
        BW: power of two, at least W - 1.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = channel < C
    if HV > 0:
        if tl.program_id(1) == 0:
            store_gates(a, b, a_log, dt_bias, g, beta, row, 1, a_stride, b_stride, HV=HV, BH=BH, BT=1)
    target = out + row * C + channel
    if slot < 0:
        tl.store(target, tl.zeros((BC,), out.dtype.element_ty), mask=in_c)
        return
    column = tl.arange(0, BW)
    place = states + (slot * C + channel)[None, :] * (W - 1) + column[:, None]
    old = tl.load(place, mask=(column < W - 1)[:, None] & in_c[None, :], other=0.0).to(tl.float32)
    taps = tl.load(
        weight + channel[None, :] * W + column[:, None], mask=(column < W - 1)[:, None] & in_c[None, :], other=0.0
    )
    token = tl.load(x + row * x_stride + channel, mask=in_c, other=0.0)
    result = token.to(tl.float32) * tl.load(weight + channel * W + W - 1, mask=in_c, other=0.0).to(tl.float32)
    result += tl.sum(old * taps.to(tl.float32), axis=0)
    if HAS_BIAS:
        result += tl.load(bias + channel, mask=in_c, other=0.0).to(tl.float32)
    if SILU:
        result = result * tl.sigmoid(result)
    tl.store(target, result.to(out.dtype.element_ty), mask=in_c)
    # A column is written by another thread than the one that read it: all reads must be done before the first write.
    tl.debug_barrier()
    tl.store(
        place - 1, old.to(states.dtype.element_ty), mask=((column > 0) & (column < W - 1))[:, None] & in_c[None, :]
    )
    newest = states + (slot * C + channel) * (W - 1) + W - 2
    tl.store(newest, token.to(tl.float32).to(states.dtype.element_ty), mask=in_c)

"""The Triton kernel of :mod:`benchmarks.token_serial`, apart so that Triton is imported only where there is a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_serial_kernel(
    q,
    k,
    v,
    g,
    beta,
    a_log,
    dt_bias,
    out,
    cu_seqlens,
    states,
    sources,
    destinations,
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
    RAW_GATES: tl.constexpr,
):
    """Grid ``(N, H_v, cdiv(D_v, BV))``; arguments as :func:`benchmarks.token_serial.token_serial`.

    The state ``[BK, BV]`` stays in registers in fp32. ``a_log`` and ``dt_bias`` are read only with RAW_GATES.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HV // HK)
    dim_k = tl.arange(0, BK)
    dim_v = tl.program_id(2) * BV + tl.arange(0, BV)
    in_k, in_v = dim_k < DK, dim_v < DV
    tile = head * (DK * DV) + dim_k[:, None] * DV + dim_v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]

    source = tl.load(sources + sequence)
    started = dim_k < tl.where(source >= 0, DK, 0)
    start_mask = started[:, None] & in_v[None, :]
    state = tl.load(states + source.to(tl.int64) * (HV * DK * DV) + tile, mask=start_mask, other=0.0).to(tl.float32)
    if RAW_GATES:
        rate = -tl.exp(tl.load(a_log + head))
        shift = tl.load(dt_bias + head)

    first, last = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    for token in range(first, last):
        query = tl.load(q + token * q_stride + key_head * DK + dim_k, mask=in_k, other=0.0).to(tl.float32)
        key = tl.load(k + token * k_stride + key_head * DK + dim_k, mask=in_k, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + head * DV + dim_v, mask=in_v, other=0.0).to(tl.float32)
        decay = tl.load(g + token * g_stride + head).to(tl.float32)
        strength = tl.load(beta + token * beta_stride + head).to(tl.float32)
        if RAW_GATES:
            biased = decay + shift
            # softplus; beyond 20 it equals its argument in fp32
            decay = rate * tl.where(biased > 20.0, biased, tl.log(1.0 + tl.exp(tl.minimum(biased, 20.0))))
            strength = tl.sigmoid(strength)
        query *= scale / tl.sqrt(tl.sum(query * query, 0) + NORM_EPS)
        key /= tl.sqrt(tl.sum(key * key, 0) + NORM_EPS)
        state *= tl.exp(decay)
        error = strength * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * error[None, :]
        result = tl.sum(state * query[:, None], 0)
        tl.store(out + token * (HV * DV) + head * DV + dim_v, result.to(out.dtype.element_ty), mask=in_v)

    destination = tl.load(destinations + sequence)
    if destination >= 0:
        target = states + destination.to(tl.int64) * (HV * DK * DV) + tile
        tl.store(target, state.to(states.dtype.element_ty), mask=in_tile)

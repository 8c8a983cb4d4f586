"""The walk over chunks: one program for each segment of a phase, value head and slice of ``D_v``.

The state stays in registers, transposed (``[BV, D_k]`` fp32), from the slot it is read from to the slot it is written
to. With S the state, T, A and the vectors those of ``intra``, and e = exp(G_C)::

    U = T (V - diag(rk exp G) K S)
    O = diag(scale rq exp G) Q S + A U
    S = e S + K^T diag(rk exp(G_C - G)) U
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["cu_seqlens", "sources", "destinations", "parents", "first_segment"])
def chain_kernel(
    q,
    k,
    v,
    out,
    cu_seqlens,
    states,
    sources,
    destinations,
    parents,
    vectors,
    solve,
    attend,
    first_segment,
    q_stride,
    k_stride,
    v_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
):
    """Grid ``(segments of the phase, H_v, cdiv(D_v, BV))``.

    Args:
        q, k: ``[T, H_k, D_k]``, v: ``[T, H_v, D_v]``, one dtype, token strides given, contiguous within a token.
        out: ``[T, H_v, D_v]`` contiguous, written.
        cu_seqlens: int32 ``[N + 1]``; sources, destinations, parents: int32 ``[N]``.
        states: ``[num_slots, H_v, D_k, D_v]`` contiguous, any float dtype, read and written.
        vectors, solve, attend: as written by ``intra_kernel``.
        first_segment: first segment of the phase.
        HAS_PARENTS: False: ``parents`` is not read.
    """
    segment = first_segment + tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    slot = tl.load(sources + segment)
    if HAS_PARENTS:
        parent = tl.load(parents + segment)
        handed = tl.load(destinations + parent, mask=parent >= 0, other=-1)
        slot = tl.where(parent >= 0, handed, slot)
    destination = tl.load(destinations + segment)

    dim_k = tl.arange(0, BK)
    dim_v = tl.program_id(2) * BV + tl.arange(0, BV)
    in_k, in_v = dim_k < DK, dim_v < DV
    tile = head * (DK * DV) + dim_k[None, :] * DV + dim_v[:, None]
    in_state = in_v[:, None] & in_k[None, :]
    started = dim_k < tl.where(slot >= 0, DK, 0)
    mask = in_v[:, None] & started[None, :]
    state = tl.load(states + slot.to(tl.int64) * (HV * DK * DV) + tile, mask=mask, other=0.0).to(tl.float32)

    lane = tl.arange(0, BT)
    key_head = head // (HV // HK)
    place = (start // BT + segment).to(tl.int64) * HV + head
    operand = k.dtype.element_ty
    for base in range(0, length, BT):
        valid = base + lane < length
        token = (start + base + lane).to(tl.int64)
        in_row = valid[:, None] & in_k[None, :]
        keys = tl.load(k + token[:, None] * k_stride + key_head * DK + dim_k[None, :], mask=in_row, other=0.0)
        queries = tl.load(q + token[:, None] * q_stride + key_head * DK + dim_k[None, :], mask=in_row, other=0.0)
        in_value = in_v[:, None] & valid[None, :]
        values = tl.load(v + token[None, :] * v_stride + head * DV + dim_v[:, None], mask=in_value, other=0.0)
        square = place * (BT * BT) + lane[:, None] * BT + lane[None, :]
        inverse = tl.load(solve + square)
        weights = tl.load(attend + square)
        vector = vectors + place * (4 * BT)
        key_reach = tl.load(vector + lane)
        query_reach = tl.load(vector + BT + lane)
        key_left = tl.load(vector + 2 * BT + lane)
        fade = tl.load(vector + 3 * BT)

        rounded = state.to(operand)
        recalled = tl.dot(rounded, tl.trans(keys), input_precision="ieee")
        error = values.to(tl.float32) - recalled * key_reach[None, :]
        update = tl.dot(error.to(operand), tl.trans(inverse), input_precision="ieee")
        result = tl.dot(rounded, tl.trans(queries), input_precision="ieee") * query_reach[None, :]
        result += tl.dot(update.to(operand), tl.trans(weights), input_precision="ieee")
        state = state * fade
        state += tl.dot((update * key_left[None, :]).to(operand), keys, input_precision="ieee")
        target = out + token[None, :] * (HV * DV) + head * DV + dim_v[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=in_value)
        place += HV

    if destination >= 0:
        target = states + destination.to(tl.int64) * (HV * DK * DV) + tile
        tl.store(target, state.to(states.dtype.element_ty), mask=in_state)

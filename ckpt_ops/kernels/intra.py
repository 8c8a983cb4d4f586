"""The part of the chunked delta rule that no state enters: one program for each chunk of each value head.

With ``G`` the inclusive sum of log gates within the chunk, ``rk``, ``rq`` the inverse L2 norms (arXiv 2412.06464,
section 3.3; UT transform: arXiv 2406.06484)::

    L_ij = beta_i exp(G_i - G_j) rk_i rk_j k_i.k_j  (j < i)      T = (I + L)^-1 diag(beta)
    A_ij = scale exp(G_i - G_j) rq_i rk_j q_i.k_j   (j <= i)

Keys and queries are used as they came, exact in their dtype, and the norms go into T's system, A and three vectors, so
normalised copies are never rounded or stored. ``I + L`` is inverted in two steps: its 16 x 16 diagonal blocks by
forward substitution in fp32 (product forms lose two digits on correlated keys), then, with ``D`` those blocks and
``N = D^-1 (I + L - D)`` strictly block lower, so ``N^4 = 0`` in four blocks or less::

    (I + L)^-1 = (I - N)(I + N^2) D^-1

Entries are bounded by 1, so half precision inputs use fp16 operands there, which have three bits more than bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt_ops.kernels.common import find_segment


@triton.jit
def invert_diagonal_blocks(lower, inbox, outbox, BT: tl.constexpr):
    """Block diagonal fp32 ``[BT, BT]`` of the inverses of the 16 x 16 diagonal blocks of ``I + lower``.

    Each thread owns a column of one block and substitutes on its own, so the 15 dependent steps need neither shuffles
    nor barriers; that takes a layout change by way of memory, ``inbox`` and ``outbox``, fp32 ``[BT * 16]`` each. Within
    ``inbox`` blocks are stored transposed: without contiguity to exploit, the compiler keeps columns on threads.
    """
    SIZE: tl.constexpr = 16
    lane = tl.arange(0, BT)
    block, inner = lane // SIZE, lane % SIZE
    same = block[:, None] == block[None, :]
    tl.store(inbox + block[:, None] * (SIZE * SIZE) + inner[None, :] * SIZE + inner[:, None], lower, mask=same)
    tl.debug_barrier()
    column = tl.arange(0, 128)  # more than BT: the rest repeats, so that each of 128 threads has one
    owner = (column // SIZE) % (BT // SIZE)
    row = tl.arange(0, SIZE)
    inverse = tl.where(row[:, None] == (column % SIZE)[None, :], 1.0, 0.0)
    place = inbox + owner[None, :] * (SIZE * SIZE) + row[:, None] * SIZE
    for i in tl.static_range(1, SIZE):
        change = tl.sum(tl.load(place + i) * inverse, axis=0)
        inverse = tl.where((row == i)[:, None], inverse - change[None, :], inverse)
    tl.store(outbox + row[:, None] * BT + column[None, :], inverse, mask=(column < BT)[None, :])
    tl.debug_barrier()
    return tl.load(outbox + inner[:, None] * BT + lane[None, :], mask=same, other=0.0)


@triton.jit
def invert_unit_lower(lower, inbox, outbox, BT: tl.constexpr, OPERAND: tl.constexpr):
    """``(I + lower)^-1`` for a strictly lower triangular fp32 ``[BT, BT]``, BT one of 16, 32 and 64."""
    lane = tl.arange(0, BT)
    diagonal = invert_diagonal_blocks(lower, inbox, outbox, BT)
    outside = tl.where((lane // 16)[:, None] == (lane // 16)[None, :], 0.0, lower)
    start = diagonal.to(OPERAND)
    nilpotent = tl.dot(start, outside.to(OPERAND), input_precision="ieee")
    factor = nilpotent.to(OPERAND)
    square = tl.dot(factor, factor, input_precision="ieee").to(OPERAND)
    partial = diagonal + tl.dot(square, start, input_precision="ieee")
    return partial - tl.dot(factor, partial.to(OPERAND), input_precision="ieee")


# Tensors in the list are read one element a thread, so their alignment makes no other code.
@triton.jit(do_not_specialize=["g", "beta", "cu_seqlens", "num_segments", "g_stride", "beta_stride"])
def intra_kernel(
    q,
    k,
    g,
    beta,
    cu_seqlens,
    vectors,
    solve,
    attend,
    num_segments,
    q_stride,
    k_stride,
    g_stride,
    beta_stride,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    MIN_LOG_GATE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    SOLVE_OPERAND: tl.constexpr,
):
    """Grid ``(T // BT + N, H_v)``.

    Args:
        q, k: ``[T, H_k, D_k]``, token strides ``q_stride``, ``k_stride``, contiguous within a token.
        g, beta: ``[T, H_v]`` any float dtype, token strides ``g_stride``, ``beta_stride``.
        cu_seqlens: int32 ``[N + 1]``.
        vectors: fp32 ``[chunks, H_v, 4, BT]``, written: ``rk exp(G)``, ``scale rq exp(G)``, ``rk exp(G_C - G)`` and
            ``exp(G_C)`` in every place.
        solve, attend: ``[chunks, H_v, BT, BT]`` in q's dtype, written: T and A, row-major.
        scale: fp32.
        SOLVE_OPERAND: dtype of the operands of the products in the inverse.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    segment = find_segment(cu_seqlens, num_segments, chunk, BT)
    start = tl.load(cu_seqlens + segment)
    end = tl.load(cu_seqlens + segment + 1)
    first = start + (chunk - (start // BT + segment)) * BT
    if first >= end:
        return
    lane = tl.arange(0, BT)
    valid = lane < end - first
    token = (first + lane).to(tl.int64)
    dim = tl.arange(0, BK)
    key_head = head // (HV // HK)
    inside = valid[:, None] & (dim < DK)[None, :]
    keys = tl.load(k + token[:, None] * k_stride + key_head * DK + dim[None, :], mask=inside, other=0.0)
    queries = tl.load(q + token[:, None] * q_stride + key_head * DK + dim[None, :], mask=inside, other=0.0)
    gate = tl.load(g + token * g_stride + head, mask=valid, other=0.0).to(tl.float32)
    strength = tl.load(beta + token * beta_stride + head, mask=valid, other=0.0).to(tl.float32)

    wide = keys.to(tl.float32)
    key_norm = tl.rsqrt(tl.sum(wide * wide, axis=1) + NORM_EPS)
    wide = queries.to(tl.float32)
    query_norm = tl.rsqrt(tl.sum(wide * wide, axis=1) + NORM_EPS) * scale
    gate = tl.maximum(gate, MIN_LOG_GATE)
    # Whole numbers and fractions are summed apart: whole sums are exact, so that a sum of -1000 keeps the digits that
    # decide a difference of -1.
    whole = tl.floor(gate + 0.5)
    coarse, fine = tl.cumsum(whole, axis=0), tl.cumsum(gate - whole, axis=0)
    left = (tl.sum(whole, axis=0) - coarse) + (tl.sum(gate - whole, axis=0) - fine)

    earlier = lane[:, None] >= lane[None, :]
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    decay = tl.where(earlier, tl.exp(tl.where(earlier, between, 0.0)), 0.0) * key_norm[None, :]
    products = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    lower = products * decay * (strength * key_norm)[:, None]
    lower = tl.where(lane[:, None] > lane[None, :], lower, 0.0)
    place = chunk.to(tl.int64) * HV + head
    # Until they are written, T's and A's own places are the scratch: it takes 64 BT bytes of their 2 BT^2 or more.
    inbox = (solve + place * (BT * BT)).to(tl.pointer_type(tl.float32))
    outbox = (attend + place * (BT * BT)).to(tl.pointer_type(tl.float32))
    inverse = invert_unit_lower(lower, inbox, outbox, BT, SOLVE_OPERAND)
    tl.debug_barrier()

    tile = place * (BT * BT) + lane[:, None] * BT + lane[None, :]
    tl.store(solve + tile, (inverse * strength[None, :]).to(solve.dtype.element_ty))
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    tl.store(attend + tile, (products * decay * query_norm[:, None]).to(attend.dtype.element_ty))
    vector = vectors + place * (4 * BT) + lane
    reach = tl.exp(coarse + fine)
    tl.store(vector, key_norm * reach)
    tl.store(vector + BT, query_norm * reach)
    tl.store(vector + 2 * BT, key_norm * tl.exp(tl.minimum(left, 0.0)))
    tl.store(vector + 3 * BT, tl.exp(tl.sum(gate, axis=0)) + tl.zeros((BT,), tl.float32))

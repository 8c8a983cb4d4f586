"""Attention of one token a request over rows found through a table; split over the rows, then combined."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table", "lines", "positions", "q_head_stride", "table_stride"])
def attention_split_kernel(
    q,
    keys,
    values,
    table,
    lines,
    positions,
    partial,
    lse,
    q_row_stride,
    q_head_stride,
    table_stride,
    scale,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Online softmax over one share of a request's rows. Grid ``(B, H_kv, SPLITS)``.

    The share depends on the request's own length only, so neither its neighbours nor a replayed grid change its sums.

    Args:
        q: ``[B, H_q, D]``, row and head strides given; query head ``h`` reads key head ``h // G``.
        keys, values: ``[rows, H_kv, D]`` contiguous.
        table: int32 ``[lines, capacity]``; lines, positions: int64 ``[B]``.
        partial: float32 ``[B, H_q, SPLITS, D]``, written; lse: float32 ``[B, H_q, SPLITS]``, written.
        BG, BD, BN: powers of two, at least 16, that pad G and D and cut the rows.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    start = split * share
    group, dim = tl.arange(0, BG), tl.arange(0, BD)
    in_group, in_dim = group < G, dim < D
    place = ((row * HKV + head) * G + group) * SPLITS + split
    if start >= length:
        tl.store(lse + place, tl.full((BG,), float("-inf"), tl.float32), mask=in_group)
        return
    stop = tl.minimum(start + share, length)
    inside_q = in_group[:, None] & in_dim[None, :]
    query_head = head * G + group
    query = tl.load(
        q + row * q_row_stride + query_head[:, None] * q_head_stride + dim[None, :], mask=inside_q, other=0.0
    )
    line = table + tl.load(lines + row) * table_stride
    highest = tl.full((BG,), float("-inf"), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    result = tl.zeros((BG, BD), tl.float32)
    for first in range(start, stop, BN):
        column = first + tl.arange(0, BN)
        inside = column < stop
        rows = tl.load(line + column, mask=inside, other=0).to(tl.int64)
        offset = (rows * HKV + head)[:, None] * D + dim[None, :]
        valid = inside[:, None] & in_dim[None, :]
        key = tl.load(keys + offset, mask=valid, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp(highest - raised)
        weight = tl.exp(scores - raised[:, None])
        value = tl.load(values + offset, mask=valid, other=0.0)
        total = total * shrink + tl.sum(weight, axis=1)
        result = result * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = raised
    tl.store(lse + place, highest + tl.log(total), mask=in_group)
    tl.store(partial + place[:, None] * D + dim[None, :], result / total[:, None], mask=inside_q)


@triton.jit
def attention_combine_kernel(
    partial, lse, out, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr
):
    """Weigh the shares by their part of the summed exponentials. Grid ``(B * H_q,)``.

    Args:
        partial: float32 ``[B * H_q, SPLITS, D]``; lse: float32 ``[B * H_q, SPLITS]``, -inf for an empty share.
        out: ``[B * H_q, D]`` contiguous, written.
    """
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, BS), tl.arange(0, BD)
    part = tl.load(lse + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp(part - tl.max(part, axis=0))
    used = (weight > 0)[:, None] & (dim < D)[None, :]
    values = tl.load(partial + (row * SPLITS + split)[:, None] * D + dim[None, :], mask=used, other=0.0)
    result = tl.sum(values * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + row * D + dim, result.to(out.dtype.element_ty), mask=dim < D)

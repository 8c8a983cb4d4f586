"""Attention of packed pieces over a prefix that is stored once and their own tokens.

Pieces that continue the same prefix sit side by side in the packed row. Where torch's variable-length attention runs,
the row attends to its own tokens (causally) and to the prefixes (all of them, one sequence per prefix) in two calls,
whose results are merged by their log-sum-exp (Milakov and Gimelshein, arXiv 1805.02867, section 3.1). Elsewhere each
group of pieces with one prefix is one call of scaled dot product attention with a mask. On a GPU decode tokens go
through a table of each request's rows (``row_table.py``), whose shapes do not change from step to step.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ckpt_ops.attention import decode_attention

from .pools import KVPools

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    _VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:
    _VARLEN_PARAMETERS = frozenset()

Rows = slice | Tensor
"""Pool rows: a slice where they are contiguous, so that no copy is made, else an index tensor."""


@dataclass(frozen=True, slots=True)
class MaskedGroup:
    """Pieces with one prefix, for scaled dot product attention.

    Attributes:
        queries: columns of the part.
        rows: key/value rows of the prefix and then of each piece's own tokens.
        mask: bool ``[queries, rows]``, True where a token may look; None for one causal piece without a past.
    """

    queries: slice
    rows: Rows
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class VarlenPass:
    """One call of variable-length attention.

    Attributes:
        queries: columns of the part that attend.
        rows: key/value rows; None when they are the step's own tokens in order.
        cu_queries, cu_rows: int32 ``[N + 1]`` sequence bounds.
        max_queries, max_rows: longest sequence.
        causal: whether query i of n sees the first ``m - n + i + 1`` of m rows.
    """

    queries: slice
    rows: Rows | None
    cu_queries: Tensor
    cu_rows: Tensor
    max_queries: int
    max_rows: int
    causal: bool


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Where each decode token's keys and values are.

    Attributes:
        table: int32 ``[lines, capacity]``, key/value row by line and position.
        lines: int64 ``[B]``, line of each token's request.
        positions: int64 ``[B]``, position of each token, which sees rows 0 up to its own.
    """

    table: Tensor
    lines: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Neighbouring columns of the packed row that attend in one way; columns inside count from the part's first.

    Attributes:
        columns: which columns of the packed row.
        write_rows: int64 ``[T']``, where each token's key and value are stored.
        groups: the masked calls, or empty when ``own`` or ``decode`` is set.
        own, prefix: the variable-length calls; ``prefix`` is None when no piece continues another.
        decode: one token for each of some running requests, through a table of their rows.
    """

    columns: slice
    write_rows: Tensor
    groups: tuple[MaskedGroup, ...] = ()
    own: VarlenPass | None = None
    prefix: VarlenPass | None = None
    decode: DecodeRows | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a packed row attends; made once a step, read by every attention layer.

    A part's result does not depend on the other part: what a prompt computes does not depend on who decodes beside it.

    Attributes:
        write_rows: int64 ``[T]``, where each token's key and value are stored.
        parts: the prefill pieces, then the decode tokens, where there are any.
    """

    write_rows: Tensor
    parts: tuple[AttentionPart, ...]


def varlen_supported(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's variable-length attention (flash attention) can serve these tensors."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= 256
        and head_dim % 8 == 0
        and {"return_aux", "scale"} <= _VARLEN_PARAMETERS
        and torch.cuda.get_device_capability(device)[0] >= 8
    )


def packed_attention(query: Tensor, pools: KVPools, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
    """Attention of one packed row.

    Args:
        query: ``[T, H_q, D]``.
        pools: keys and values, the step's own already written.
        layer: index of the attention layer.
        plan: from the batch.
        scale: factor of the scores.

    Returns:
        ``[T, H_q, D]`` in the query's dtype.
    """
    keys, values = pools.keys[layer], pools.values[layer]
    if len(plan.parts) == 1:
        return _attend(query, keys, values, plan.parts[0], scale)
    output = torch.empty_like(query)
    for part in plan.parts:
        output[part.columns] = _attend(query[part.columns], keys, values, part, scale)
    return output


def _attend(query: Tensor, keys: Tensor, values: Tensor, part: AttentionPart, scale: float) -> Tensor:
    if part.decode is not None:
        at = part.decode
        return decode_attention(query, keys, values, at.table, at.lines, at.positions, scale)
    if part.own is not None:
        return _varlen_attention(query, keys, values, part, scale)
    output = torch.empty_like(query)
    for group in part.groups:
        q = query[group.queries].transpose(0, 1).unsqueeze(0)
        k = keys[group.rows].transpose(0, 1).unsqueeze(0)
        v = values[group.rows].transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        output[group.queries] = attended[0].transpose(0, 1)
    return output


def _varlen_attention(query: Tensor, keys: Tensor, values: Tensor, part: AttentionPart, scale: float) -> Tensor:
    assert part.own is not None
    own, own_lse = _varlen_call(query, keys, values, part, part.own, scale)
    if part.prefix is None:
        return own
    shared, shared_lse = _varlen_call(query, keys, values, part, part.prefix, scale)
    columns = part.prefix.queries
    # softmax over both parts = each part's softmax weighted by its share of the summed exponentials
    weight = torch.sigmoid(shared_lse - own_lse[columns]).unsqueeze(-1)
    merged = torch.lerp(own[columns].float(), shared.float(), weight)
    own[columns] = merged.to(own.dtype)
    return own


def _varlen_call(
    query: Tensor, keys: Tensor, values: Tensor, part: AttentionPart, call: VarlenPass, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[T', H_q, D]`` and log-sum-exp ``[T', H_q]`` of one call."""
    q = query[call.queries].contiguous()
    rows = part.write_rows if call.rows is None else call.rows
    k, v = keys[rows], values[rows]
    options: dict[str, Any] = {"scale": scale, "return_aux": AuxRequest(lse=True)}
    if "window_size" in _VARLEN_PARAMETERS:
        options["window_size"] = (-1, 0) if call.causal else (-1, -1)
    else:
        options["is_causal"] = call.causal
    # Before the parameter existed (torch 2.11) the kernel took grouped heads as they are.
    if "enable_gqa" in _VARLEN_PARAMETERS:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    output, lse = varlen_attn(q, k, v, call.cu_queries, call.cu_rows, call.max_queries, call.max_rows, **options)
    return output, lse if lse.shape == q.shape[:2] and lse.shape[0] != lse.shape[1] else lse.transpose(0, 1)

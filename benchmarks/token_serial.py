"""The gated delta rule token by token over packed sequences: what two-phase prefill was first measured with.

A kernel of this kind serves decoding, where one token is all there is; a prefill that uses it walks ``T`` dependent
steps instead of ``T / 64``. Written from arXiv 2412.06464, eq. 10, with the L2 norms and, on request, the gates
``g = -exp(A_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)`` inside. The state is written once, at a sequence's
end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ckpt_ops import SegmentTable
from ckpt_ops.reference import NORM_EPS, l2_normalize


@dataclass(frozen=True, slots=True)
class RawGates:
    """Parameters of gates that the recurrence makes itself: ``A_log`` and ``dt_bias``, both fp32 ``[H_v]``."""

    a_log: Tensor
    dt_bias: Tensor


def token_serial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    table: SegmentTable,
    raw: RawGates | None = None,
) -> Tensor:
    """Run independent packed sequences token by token; states are read from and written to their slots.

    Args:
        q, k: ``[T, H_k, D_k]``; v: ``[T, H_v, D_v]``; one dtype, contiguous within a token.
        g, beta: ``[T, H_v]``, contiguous within a token: log decay and write strength or, with ``raw``, the
            projections ``a`` and ``b`` that they are made of.
        states: fp32 pool ``[num_slots, H_v, D_k, D_v]``, mutated.
        table: the sequences, without parents.

    Returns:
        ``[T, H_v, D_v]`` in ``v``'s dtype.
    """
    if table.num_phases > 1:
        raise ValueError(f"table must have no parents, but it has {table.num_phases} phases")
    walk = _walk_on_host if q.device.type == "cpu" else _launch
    return walk(q, k, v, g, beta, states, table, raw)


def _walk_on_host(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, table: SegmentTable, raw: RawGates | None
) -> Tensor:
    out = v.new_zeros(v.shape)
    group = v.shape[1] // k.shape[1]
    starts, lengths = table.cu_seqlens[:-1].long(), table.cu_seqlens.diff()
    state = states[table.sources.clamp_min(0).long()].float() * (table.sources >= 0)[:, None, None, None]
    for step in range(int(lengths.max()) if lengths.numel() else 0):
        active = torch.nonzero(lengths > step).flatten()
        rows = starts[active] + step
        queries = l2_normalize(q[rows].float()).repeat_interleave(group, 1) * q.shape[-1] ** -0.5
        keys = l2_normalize(k[rows].float()).repeat_interleave(group, 1)
        decay, strength = g[rows].float(), beta[rows].float()
        if raw is not None:
            decay, strength = -raw.a_log.exp() * softplus(decay + raw.dt_bias), strength.sigmoid()
        held = state[active] * decay.exp()[..., None, None]
        error = strength[..., None] * (v[rows].float() - torch.einsum("nhk,nhkv->nhv", keys, held))
        held = held + keys[..., None] * error[..., None, :]
        state[active] = held
        out[rows] = torch.einsum("nhk,nhkv->nhv", queries, held).to(out.dtype)
    kept = torch.nonzero(table.destinations >= 0).flatten()
    states[table.destinations[kept].long()] = state[kept].to(states.dtype)
    return out


def _launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, table: SegmentTable, raw: RawGates | None
) -> Tensor:
    from benchmarks.token_serial_kernel import token_serial_kernel

    out = v.new_empty(v.shape)
    dim_k, (_, heads_v, dim_v) = q.shape[2], v.shape
    block_v = 32
    token_serial_kernel[(table.num_segments, heads_v, -(-dim_v // block_v))](
        q,
        k,
        v,
        g,
        beta,
        raw.a_log if raw else g,
        raw.dt_bias if raw else g,
        out,
        table.cu_seqlens,
        states,
        table.sources,
        table.destinations,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        beta.stride(0),
        dim_k**-0.5,
        HK=q.shape[1],
        HV=heads_v,
        DK=dim_k,
        DV=dim_v,
        BK=1 << (dim_k - 1).bit_length(),
        BV=block_v,
        NORM_EPS=NORM_EPS,
        RAW_GATES=raw is not None,
        num_warps=4,
    )
    return out

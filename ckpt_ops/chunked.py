"""The CPU implementation of the gated delta rule: its chunk form in batched PyTorch.

Chunk form (arXiv 2412.06464, section 3.3; the UT transform is that of arXiv 2406.06484, eq. 10 and 11). With ``G`` the
inclusive sum of the log gates within a chunk of C tokens and ``S`` the state at its start::

    L_ij = beta_i exp(G_i - G_j) k_i.k_j  (j < i)      T = (I + L)^-1 diag(beta)
    A_ij = exp(G_i - G_j) q_i.k_j         (j <= i)
    U  = T (V - diag(exp G) K S)
    O  = diag(exp G) Q S + A U
    S' = exp(G_C) S + K^T diag(exp(G_C - G)) U

Everything but the last three lines is independent of the state and is done for all chunks at once; the walk over chunks
is batched over the segments of a phase. Gates enter only as exponentials of differences that are never positive, and
are summed in fp64: a sum of -1000 in fp32 has lost the digits that decide a difference of -1.

A sequence's result must not depend, to the bit, on what else is in the batch. Three rules keep it so: a chunk is padded
to 16, 32 or 64 rows by its own length only; head dimensions are padded to multiples of 16, below which BLAS switches
kernels by batch size and alignment; and no function is used whose vector body and scalar tail round differently
(``torch.sigmoid`` and ``silu`` do, ``torch.exp`` does not).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ckpt_ops.checks import rows_in_use
from ckpt_ops.reference import l2_normalize

CHUNK = 64
# exp(-110) is 0 in float32; the bound keeps sums finite for gates of -inf, whose differences would be NaN.
MIN_LOG_GATE = -110.0
_PADDED_LENGTHS = (16, 32, CHUNK)
_DIM_MULTIPLE = 16


def work_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _pad_dim(x: Tensor) -> Tensor:
    return pad(x, (0, -x.shape[-1] % _DIM_MULTIPLE))


@dataclass(frozen=True, slots=True)
class _Bucket:
    """State-independent factors of all chunks padded to C rows: n chunks, R value heads for each key head."""

    rows: Tensor  # int64 [n, C], token of each row
    valid: Tensor  # bool [n, C]
    q: Tensor  # [n, H_k, C, D_k], scaled
    k: Tensor  # [n, H_k, C, D_k]
    v: Tensor  # [n, H_k, R, C, D_v]
    gate_sum: Tensor  # G, fp64 [n, H_k, R, C]
    solve: Tensor  # T, [n, H_k, R, C, C]
    attend: Tensor  # A, [n, H_k, R, C, C]


@dataclass(frozen=True, slots=True)
class _Chunk:
    segment: int
    step: int
    start: int
    length: int

    @property
    def padded(self) -> int:
        return next(size for size in _PADDED_LENGTHS if self.length <= size)


def _chunks(bounds: Sequence[int]) -> list[_Chunk]:
    return [
        _Chunk(segment, step, start, min(CHUNK, bounds[segment + 1] - start))
        for segment in range(len(bounds) - 1)
        for step, start in enumerate(range(bounds[segment], bounds[segment + 1], CHUNK))
    ]


def _bucket(
    chunks: Sequence[_Chunk], size: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> _Bucket:
    dtype = work_dtype(q, k, v, g, beta)
    heads, group = k.shape[1], v.shape[1] // k.shape[1]
    offsets = torch.arange(size)
    starts = torch.tensor([chunk.start for chunk in chunks])
    valid = offsets < torch.tensor([chunk.length for chunk in chunks])[:, None]
    rows = torch.where(valid, starts[:, None] + offsets, starts[:, None])

    def gather(x: Tensor) -> Tensor:
        tokens = x[rows].to(dtype)
        return tokens.masked_fill_(~valid.view(*valid.shape, *[1] * (tokens.dim() - 2)), 0)

    qn = _pad_dim(l2_normalize(gather(q)) * scale).transpose(1, 2).contiguous()
    kn = _pad_dim(l2_normalize(gather(k))).transpose(1, 2).contiguous()
    values = torch.unflatten(_pad_dim(gather(v)).transpose(1, 2).contiguous(), 1, (heads, group))
    gates = gather(g).clamp_(min=MIN_LOG_GATE).transpose(1, 2).double()
    gate_sum = torch.unflatten(gates.cumsum(-1), 1, (heads, group))
    betas = torch.unflatten(gather(beta).transpose(1, 2).contiguous(), 1, (heads, group))

    ahead = torch.ones(size, size, dtype=torch.bool).triu(1)
    decay = (gate_sum[..., :, None] - gate_sum[..., None, :]).to(dtype).masked_fill_(ahead, -torch.inf).exp_()
    lower = (kn @ kn.mT)[:, :, None] * decay * betas[..., None]
    solve = torch.linalg.solve_triangular(lower, torch.diag_embed(betas), upper=False, unitriangular=True)
    attend = (qn @ kn.mT)[:, :, None] * decay
    return _Bucket(rows, valid, qn, kn, values, gate_sum, solve, attend)


def _advance(bucket: _Bucket, picked: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Move m states over one chunk each.

    Args:
        bucket: factors.
        picked: int64 ``[m]``, the chunk of each state.
        state: ``[m, H_k, D_k, R * D_v]``, padded dimensions.

    Returns:
        Output ``[m, C, H_v, D_v]`` and the new states.
    """
    q, k, v = bucket.q[picked], bucket.k[picked], bucket.v[picked]
    gate_sum = bucket.gate_sum[picked][..., None]
    group, dim = v.shape[2], v.shape[-1]

    def by_head(x: Tensor) -> Tensor:  # [m, H_k, C, R * D_v] -> [m, H_k, R, C, D_v]
        return torch.unflatten(x, -1, (group, dim)).transpose(2, 3)

    reach = gate_sum.exp().to(state.dtype)
    u = bucket.solve[picked] @ (v - reach * by_head(k @ state))
    out = reach * by_head(q @ state) + bucket.attend[picked] @ u
    last = gate_sum[..., -1:, :]
    kept = ((last - gate_sum).exp().to(state.dtype) * u).transpose(2, 3).flatten(-2)
    fade = last.exp().to(state.dtype).squeeze(-1).expand(-1, -1, -1, dim).flatten(-2)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), fade * state + k.mT @ kept


class _Pool:
    """Start and final states of segments in the layout of the walk, ``[m, H_k, D_k, R * D_v]`` with padded dims."""

    def __init__(self, states: Tensor, group: int, dtype: torch.dtype) -> None:
        self.states, self.group, self.dtype = states, group, dtype

    def load(self, slots: Sequence[int]) -> Tensor:
        _, value_heads, dim_k, dim_v = self.states.shape
        start = self.states.new_zeros(len(slots), value_heads, dim_k, dim_v, dtype=self.dtype)
        held = [row for row, slot in enumerate(slots) if slot >= 0]
        if held:
            start[held] = self.states[[slots[row] for row in held]].to(self.dtype)
        start = pad(start, (0, -dim_v % _DIM_MULTIPLE, 0, -dim_k % _DIM_MULTIPLE))
        return torch.unflatten(start, 1, (-1, self.group)).transpose(2, 3).flatten(-2)

    def store(self, slots: Sequence[int], final: Tensor) -> None:
        kept = [row for row, slot in enumerate(slots) if slot >= 0]
        if kept:
            _, _, dim_k, dim_v = self.states.shape
            heads = torch.unflatten(final[kept], -1, (self.group, -1)).transpose(2, 3).flatten(1, 2)
            self.states[[slots[row] for row in kept]] = heads[..., :dim_k, :dim_v].to(self.states.dtype)


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Packed independent sequences; arguments as the registered op."""
    parents = torch.full_like(sources, -1)
    offsets = (0, sources.numel())
    return two_phase_gdn_prefill(q, k, v, g, beta, cu_seqlens, states, sources, destinations, parents, offsets, scale)


def two_phase_gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor,
    phase_offsets: Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """A packed forest; arguments as the registered op."""
    out = v.new_zeros(v.shape)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chunks = _chunks(cu_seqlens.tolist())
    by_size = {size: [chunk for chunk in chunks if chunk.padded == size] for size in _PADDED_LENGTHS}
    buckets = {size: _bucket(part, size, q, k, v, g, beta, scale) for size, part in by_size.items() if part}
    place = {(chunk.segment, chunk.step): (size, i) for size, part in by_size.items() for i, chunk in enumerate(part)}

    kept, starts = destinations.tolist(), sources.tolist()
    for segment, parent in enumerate(parents.tolist()):
        if parent >= 0:
            starts[segment] = kept[parent]
    pool = _Pool(states, v.shape[1] // k.shape[1], work_dtype(q, k, v, g, beta))
    for first, last in pairwise(phase_offsets):
        if first == last:
            continue
        state = pool.load(starts[first:last])
        active, step = list(range(first, last)), 0
        while active := [segment for segment in active if (segment, step) in place]:
            for size, bucket in buckets.items():
                members = [segment for segment in active if place[segment, step][0] == size]
                if members:
                    picked = torch.tensor([place[segment, step][1] for segment in members])
                    lanes = torch.tensor(members) - first
                    heads, state[lanes] = _advance(bucket, picked, state[lanes])
                    valid = bucket.valid[picked]
                    out[bucket.rows[picked][valid]] = heads[valid][..., : v.shape[-1]].to(out.dtype)
            step += 1
        pool.store(kept[first:last], state)
    return out


def gdn_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, scale: float | None = None
) -> Tensor:
    """One token for each row, states in place; arguments as the registered op."""
    out = v.new_zeros(v.shape)
    rows = rows_in_use(slots, states.shape[0])
    if rows.numel() == 0:
        return out
    dtype = work_dtype(q, k, v, g, beta)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group, held = v.shape[1] // k.shape[1], slots[rows].long()
    state = states[held].to(dtype)
    state *= g[rows].to(dtype).exp()[..., None, None]
    keys = l2_normalize(k[rows].to(dtype)).repeat_interleave(group, 1)[..., None]
    queries = (l2_normalize(q[rows].to(dtype)) * scale).repeat_interleave(group, 1)[..., None]
    delta = beta[rows].to(dtype)[..., None] * (v[rows].to(dtype) - (keys * state).sum(-2))
    state += keys * delta[..., None, :]
    states[held] = state.to(states.dtype)
    out[rows] = (queries * state).sum(-2).to(out.dtype)
    return out

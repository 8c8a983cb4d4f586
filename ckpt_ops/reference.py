"""Token-by-token reference of all ops: the oracle of the tests, in float64 unless asked otherwise.

Gated delta rule, Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, eq. 10, with the state
``S [D_k, D_v]`` stored key dimension first and keys and queries L2-normalised::

    S <- exp(g_t) S
    S <- S + beta_t k_t (v_t - k_t^T S)
    o_t = scale * q_t^T S

Nothing here is fast, nothing is mutated, and nothing is rounded on the way: children start from their parent's exact
final state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckpt_ops.segments import SegmentTable

NORM_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension, in ``x``'s dtype."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def delta_rule_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of eq. 10 for all value heads.

    Args:
        state: ``[H_v, D_k, D_v]``.
        q, k: ``[H_k, D_k]``, normalised, ``q`` scaled; value head ``h`` uses key head ``h // (H_v // H_k)``.
        v: ``[H_v, D_v]``.
        g, beta: ``[H_v]``.

    Returns:
        The new state and the output ``[H_v, D_v]``.
    """
    group = v.shape[0] // k.shape[0]
    q, k = q.repeat_interleave(group, 0), k.repeat_interleave(group, 0)
    state = state * g.exp()[:, None, None]
    recalled = torch.einsum("hk,hkv->hv", k, state)
    state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - recalled))
    return state, torch.einsum("hk,hkv->hv", q, state)


def gdn_prefill_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    table: SegmentTable,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H_v, D_v]`` and pool ``[num_slots, H_v, D_k, D_v]`` after the batch, both in ``dtype``.

    Arguments as in :func:`ckpt_ops.two_phase_gdn_prefill`; any forest of segments is allowed.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = l2_normalize(q.to(dtype)) * scale, l2_normalize(k.to(dtype))
    v, g, beta, pool = v.to(dtype), g.to(dtype), beta.to(dtype), states.to(dtype, copy=True)
    start = pool.clone()
    out = torch.zeros_like(v)
    bounds: list[int] = table.cu_seqlens.tolist()
    finals: list[Tensor] = []
    links = zip(table.parents.tolist(), table.sources.tolist(), table.destinations.tolist(), strict=True)
    for index, (parent, source, destination) in enumerate(links):
        own = start[source] if source >= 0 else pool.new_zeros(pool.shape[1:])
        state = finals[parent] if parent >= 0 else own
        for t in range(bounds[index], bounds[index + 1]):
            state, out[t] = delta_rule_step(state, q[t], k[t], v[t], g[t], beta[t])
        finals.append(state)
        if destination >= 0:
            pool[destination] = state
    return out, pool


def causal_conv1d_prefill_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    table: SegmentTable,
    *,
    activation: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output ``[T, C]`` and pool ``[num_slots, C, W - 1]`` after the batch, both in ``dtype``.

    ``y_t[c] = bias[c] + sum_w weight[c, w] x_{t - (W - 1) + w}[c]``, where tokens before the segment are its history.
    """
    x, pool = x.to(dtype), states.to(dtype, copy=True)
    start, keep = pool.clone(), weight.shape[1] - 1
    out = torch.zeros_like(x)
    bounds: list[int] = table.cu_seqlens.tolist()
    finals: list[Tensor] = []
    links = zip(table.parents.tolist(), table.sources.tolist(), table.destinations.tolist(), strict=True)
    for index, (parent, source, destination) in enumerate(links):
        own = start[source] if source >= 0 else x.new_zeros(x.shape[1], keep)
        history = finals[parent] if parent >= 0 else own
        for t in range(bounds[index], bounds[index + 1]):
            out[t], history = _conv_step(x[t], weight.to(dtype), bias, history, activation)
        finals.append(history)
        if destination >= 0:
            pool[destination] = history
    return out, pool


def gdn_decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One token a row: output ``[B, H_v, D_v]`` and the pool after it, in ``dtype``; slot -1 gives a zero row."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = l2_normalize(q.to(dtype)) * scale, l2_normalize(k.to(dtype))
    v, g, beta, pool = v.to(dtype), g.to(dtype), beta.to(dtype), states.to(dtype, copy=True)
    out = torch.zeros_like(v)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pool[slot], out[row] = delta_rule_step(pool[slot], q[row], k[row], v[row], g[row], beta[row])
    return out, pool


def causal_conv1d_decode_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    *,
    activation: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One token a row: output ``[B, C]`` and the pool after it, in ``dtype``; slot -1 gives a zero row."""
    x, pool = x.to(dtype), states.to(dtype, copy=True)
    out = torch.zeros_like(x)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[row], pool[slot] = _conv_step(x[row], weight.to(dtype), bias, pool[slot], activation)
    return out, pool


def _conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    window = torch.cat([history, x[:, None]], 1)
    y = (window * weight).sum(1)
    if bias is not None:
        y = y + bias.to(y.dtype)
    if activation == "silu":
        y = y * torch.sigmoid(y)
    return y, window[:, 1:]


def gates_reference(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """``g = -exp(a_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, both ``[T, H_v]`` in ``dtype``."""
    step = a.to(dtype) + dt_bias.to(dtype)
    return -torch.exp(a_log.to(dtype)) * torch.logaddexp(step, torch.zeros_like(step)), torch.sigmoid(b.to(dtype))

"""The CPU implementation of the short causal convolution over packed segments, and of the gates beside it.

Bitwise independent of the rest of the batch: taps are added in a fixed order, and SiLU, softplus and sigmoid are
written with ``torch.exp`` and ``torch.log1p`` because the vector body and the scalar tail of torch's own round
differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckpt_ops.checks import rows_in_use
from ckpt_ops.chunked import work_dtype


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor,
    activation: str | None = None,
) -> Tensor:
    """Packed causal convolution over a forest; arguments as the registered op."""
    tokens, channels, keep = x.shape[0], x.shape[1], weight.shape[1] - 1
    segments = sources.numel()
    dtype = work_dtype(x, weight)
    bounds = cu_seqlens.long()
    walk = (x, states, bounds, sources.long(), parents.long(), keep)
    history = _history(*walk, torch.where(parents >= 0, parents, torch.arange(segments)).long(), parents >= 0)
    final = _history(*walk, torch.arange(segments), torch.ones(segments, dtype=torch.bool))

    # One row of tokens in which each segment is preceded by its history: every tap is then one shifted slice.
    extended = torch.zeros(tokens + segments * keep, channels, dtype=dtype)
    heads = bounds[:-1] + torch.arange(segments) * keep
    extended[(heads[:, None] + torch.arange(keep)).flatten()] = history.flatten(0, 1).to(dtype)
    owner = torch.repeat_interleave(torch.arange(segments), bounds.diff())
    used = owner.numel()
    places = torch.arange(used) + (owner + 1) * keep
    extended[places] = x[:used].to(dtype)

    taps = weight.to(dtype)
    total = torch.zeros(used, channels, dtype=dtype) if bias is None else bias.to(dtype).expand(used, channels)
    for tap in range(keep + 1):
        total = total + extended[places - keep + tap] * taps[:, tap]
    out = x.new_zeros(x.shape)
    out[:used] = _activate(total, activation).to(x.dtype)

    kept = torch.nonzero(destinations >= 0).flatten()
    states[destinations[kept].long()] = final[kept].mT
    return out


def _history(
    x: Tensor,
    states: Tensor,
    bounds: Tensor,
    sources: Tensor,
    parents: Tensor,
    keep: int,
    start: Tensor,
    inside: Tensor,
) -> Tensor:
    """The ``keep`` newest tokens ``[N, keep, C]`` at the end of segment ``start[n]``, or at its start if not inside.

    Tokens of this batch are rounded to the pool's dtype, as they would be if they had come through a slot.
    """
    back = torch.arange(keep, 0, -1).expand(start.numel(), keep).clone()  # tokens still to go back
    at, lengths = start[:, None].expand_as(back).clone(), bounds.diff()
    found = inside[:, None] & (back <= lengths[at])
    walking = inside[:, None] & ~found
    back -= torch.where(walking, lengths[at], 0)
    while (climb := walking & (parents[at] >= 0)).any():
        at = torch.where(climb, parents[at], at)
        reached = climb & (back <= lengths[at])
        found |= reached
        walking &= ~reached
        back -= torch.where(climb & ~reached, lengths[at], 0)
    rows = torch.where(found, bounds[at + 1] - back, 0)
    slots = torch.where(found, -1, sources[at])
    history = torch.zeros(*back.shape, x.shape[1], dtype=states.dtype)
    history[found] = x[rows[found]].to(states.dtype)
    held = slots >= 0
    history[held] = states[slots[held], :, (keep - back)[held]]
    return history


def conv_gates_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The packed convolution and the gates of its tokens; arguments as the registered op."""
    links = (sources, destinations, parents)
    mixed = causal_conv1d_prefill(x, weight, bias, cu_seqlens, states, *links, activation)
    return mixed, *_gates(a, b, a_log, dt_bias)


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    step = a.float() + dt_bias.float()
    soft = torch.where(step > 20, step, torch.log1p(torch.exp(step)))  # as torch: beyond 20 they are equal in fp32
    strength = 1 / (1 + torch.exp(-b.to(work_dtype(b))))
    return (-torch.exp(a_log.float()) * soft).contiguous(), strength.to(b.dtype).contiguous()


def _activate(y: Tensor, activation: str | None) -> Tensor:
    return y / (1 + torch.exp(-y)) if activation == "silu" else y


def causal_conv1d_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, activation: str | None = None
) -> Tensor:
    """One token for each row, states in place; arguments as the registered op."""
    out = x.new_zeros(x.shape)
    rows = rows_in_use(slots, states.shape[0])
    dtype = work_dtype(x, weight)
    held, token = slots[rows].long(), x[rows]
    old = states[held]
    total = 0 if bias is None else bias.to(dtype)
    for tap in range(weight.shape[1] - 1):
        total = total + old[..., tap].to(dtype) * weight[:, tap].to(dtype)
    total = total + token.to(dtype) * weight[:, -1].to(dtype)
    states[held] = torch.cat([old[..., 1:], token[..., None].to(states.dtype)], -1)
    out[rows] = _activate(total, activation).to(x.dtype)
    return out


def conv_gates_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token for each row and its gates, states in place; arguments as the registered op."""
    return causal_conv1d_decode(x, weight, bias, states, slots, activation), *_gates(a, b, a_log, dt_bias)

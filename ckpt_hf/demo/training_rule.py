"""The gated delta rule and the short convolution in a form whose backward pass is quick in eager PyTorch.

transformers' own fallbacks solve a triangular system for each chunk, which a GPU's solver takes one row at a time, and
walk over chunks with a dozen launches each. Training needs neither: the triangular inverse has a closed-form gradient,
and the states of all chunks follow from one fused multiply-add each, the chunk's transition being a matrix of
``D_k x D_k``. The mathematics is the chunk form of Gated DeltaNet (arXiv 2412.06464, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu
from transformers.models.qwen3_5 import modeling_qwen3_5

_CHUNK = 64
_BLOCK = 8  # inverted by a product of three factors; its largest intermediate, 35 L^3, costs float32 little


class _UnitLowerInverse(torch.autograd.Function):
    """``(I + L)^-1`` for strictly lower triangular L ``[..., 64, 64]``, float32."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        inverse = torch.zeros_like(lower)
        _block_inverses(lower, inverse)
        size = _BLOCK
        while size < lower.shape[-1]:  # the off-diagonal block of [[A, 0], [C, B]]^-1 is -B^-1 C A^-1
            below, solved = _diagonal(lower, 2 * size), _diagonal(inverse, 2 * size)
            upper_left, lower_right = solved[..., :size, :size], solved[..., size:, size:]
            solved[..., size:, :size] = -(lower_right @ below[..., size:, :size] @ upper_left)
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT).tril(-1)


def _diagonal(x: Tensor, size: int) -> Tensor:
    """A view of the diagonal blocks, ``[..., n, size, size]``."""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _block_inverses(lower: Tensor, inverse: Tensor) -> None:
    """Write the inverses of the diagonal blocks: (I - L)(I + L^2)(I + L^4), since L^8 = 0."""
    block = _diagonal(lower, _BLOCK)
    eye = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device)
    square = block @ block
    _diagonal(inverse, _BLOCK).copy_((eye - block) @ (eye + square) @ (eye + square @ square))


def chunk_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
    """Stand-in for transformers' function of this purpose, from a zero state and without the final one.

    Args:
        query, key: ``[B, T, H_k, D_k]``, L2-normalised here.
        value: ``[B, T, H_v, D_v]``.
        g, beta: ``[B, T, H_v]``.

    Returns:
        ``[B, T, H_v, D_v]`` in ``query``'s dtype, and None.
    """
    with torch.autocast(query.device.type, enabled=False):
        output = _delta_rule(query, key, value, g, beta)
    return output.to(query.dtype), None


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    group, tokens = value.shape[2] // key.shape[2], value.shape[1]
    q, k = (_chunked(_normalized(x)).repeat_interleave(group, 1) for x in (query, key))
    q = q * key.shape[-1] ** -0.5
    v, betas = _chunked(value), _chunked(beta[..., None])
    total = _chunked(g[..., None]).cumsum(-2)  # [B, H, N, C, 1]
    ahead = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (total - total.mT).masked_fill(ahead, -torch.inf).exp()
    inverse = _UnitLowerInverse.apply((betas * (k @ k.mT) * decay).tril(-1))
    new, read = inverse @ (betas * v), inverse @ (betas * total.exp() * k)
    last = total[..., -1:, :]
    kept = k * (last - total).exp()
    eye = torch.eye(k.shape[-1], device=k.device)
    states = _states(last.exp() * eye - kept.mT @ read, kept.mT @ new)
    values = new - read @ states
    output = (q * total.exp()) @ states + ((q @ k.mT) * decay) @ values
    return output.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def _states(transition: Tensor, update: Tensor) -> Tensor:
    """States at the chunks' starts from S' = transition S + update; all ``[B, H, N, D_k, D_v or D_k]``."""
    steps, updates = (x.flatten(0, 1).unbind(1) for x in (transition, update))
    states = [torch.zeros_like(updates[0])]
    for step, added in zip(steps[:-1], updates[:-1], strict=True):
        states.append(torch.baddbmm(added, step, states[-1]))
    return torch.stack(states, 1).unflatten(0, update.shape[:2])


def _normalized(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunked(x: Tensor) -> Tensor:
    """``[B, T, H, D]`` to float32 ``[B, H, N, C, D]``, padded with zeros."""
    x = pad(x.float(), (0, 0, 0, 0, 0, -x.shape[1] % _CHUNK))
    return x.transpose(1, 2).unflatten(2, (-1, _CHUNK))


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Stand-in for transformers' function: ``[B, C, T]`` with weights ``[C, W]``, as W shifted products."""
    width, tokens = weight.shape[1], hidden_states.shape[-1]
    padded = pad(hidden_states, (width - 1, 0))
    output = weight[:, :1] * padded[..., :tokens]
    for tap in range(1, width):
        output = output + weight[:, tap, None] * padded[..., tap : tap + tokens]
    if bias is not None:
        output = output + bias[:, None]
    return (silu(output) if activation == "silu" else output).to(hidden_states.dtype)


@contextmanager
def training_rule() -> Iterator[None]:
    """Let every Qwen3.5 model of this process run on this file's functions, for a training process of its own."""
    names = {"torch_chunk_gated_delta_rule": chunk_gated_delta_rule, "causal_conv1d_fn": causal_conv1d}
    before = {name: getattr(modeling_qwen3_5, name) for name in names}
    try:
        for name, function in names.items():
            setattr(modeling_qwen3_5, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(modeling_qwen3_5, name, function)

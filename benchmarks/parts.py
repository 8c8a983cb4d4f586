"""What is timed, apart from how a load is cut into calls: the delta rule alone, or a layer from its projections on.

A part owns its pools and its parameters; an arm gives it packed token tensors and a table of segments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import softplus

import ckpt_ops
from benchmarks.loads import Shape
from benchmarks.token_serial import RawGates, token_serial
from ckpt_ops import SegmentTable
from ckpt_ops.reference import causal_conv1d_prefill_reference, gdn_prefill_reference
from ckpt_ops.testing import conv_budget, delta_rule_budget, make_delta_rule_inputs, make_pool

Tokens = tuple[Tensor, ...]


class Part(ABC):
    """One timed part with its pools.

    Attributes:
        tokens: random packed inputs, each ``[T, ...]``.
        pools: the recurrent pool ``[num_slots, H_v, D, D]`` fp32 and, with a convolution, ``[num_slots, C, W - 1]``.
        budget: largest relative error allowed of outputs and recurrent states against fp64.
    """

    tokens: Tokens
    pools: tuple[Tensor, ...]
    budget: float

    @abstractmethod
    def chunked(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        """One call of the chunked ops: ``[T, H_v, D]``."""

    @abstractmethod
    def token_serial(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        """One call of the token-by-token kernel, in place of the chunked delta rule; no parents."""

    @abstractmethod
    def reference(self, table: SegmentTable) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output ``[T, H_v, D]`` and the pools after the whole load, in fp64."""


class DeltaRule(Part):
    """The delta rule with its L2 norms, on given q, k, v and gates."""

    def __init__(self, shape: Shape, num_tokens: int, num_slots: int, device: torch.device, seed: int) -> None:
        inputs = make_delta_rule_inputs(
            num_tokens, shape.heads_k, shape.heads_v, shape.dim, shape.dim, dtype=shape.dtype, seed=seed
        )
        self.tokens = inputs.to(device).tensors()
        self.pools = (make_pool(num_slots, shape.heads_v, shape.dim, shape.dim, seed=seed + 1).to(device),)
        self.budget = delta_rule_budget(shape.dtype, rounds_operands=device.type == "cuda")

    def chunked(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        q, k, v, g, beta = tokens
        return _chunked_delta_rule(q, k, v, g, beta, self.pools[0], table)

    def token_serial(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        q, k, v, g, beta = tokens
        return token_serial(q, k, v, g, beta, self.pools[0], table)

    def reference(self, table: SegmentTable) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v, g, beta = self.tokens
        out, states = gdn_prefill_reference(q, k, v, g, beta, self.pools[0], table)
        return out, (states,)


class Layer(Part):
    """Convolution with SiLU, split, gates and delta rule, on the projections' output ``mixed``, ``a`` and ``b``."""

    def __init__(self, shape: Shape, num_tokens: int, num_slots: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(device)

        self.shape = shape
        channels = (2 * shape.heads_k + shape.heads_v) * shape.dim
        mixed, a, b = normal(num_tokens, channels), normal(num_tokens, shape.heads_v), normal(num_tokens, shape.heads_v)
        self.tokens = tuple(x.to(shape.dtype) for x in (mixed, a, b))
        self.weight = normal(channels, shape.conv_width).to(shape.dtype) * shape.conv_width**-0.5
        self.raw = RawGates(a_log=normal(shape.heads_v) - 1, dt_bias=normal(shape.heads_v) - 1)
        self.pools = (
            make_pool(num_slots, shape.heads_v, shape.dim, shape.dim, seed=seed + 1).to(device),
            make_pool(num_slots, channels, shape.conv_width - 1, dtype=shape.dtype, seed=seed + 2).to(device),
        )
        # q, k and v are rounded once more behind the convolution, and SiLU leaves keys positively correlated.
        self.budget = 3 * conv_budget(shape.dtype, shape.dtype) + delta_rule_budget(
            shape.dtype, rounds_operands=device.type == "cuda", hard=True
        )

    def chunked(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        mixed, a, b = tokens
        mixed, decay, strength = ckpt_ops.conv_gates_prefill(
            mixed,
            self.weight,
            None,
            a,
            b,
            self.raw.a_log,
            self.raw.dt_bias,
            self.pools[1],
            table,
            activation="silu",
        )
        q, k, v = self._split(mixed)
        return _chunked_delta_rule(q, k, v, decay, strength, self.pools[0], table)

    def token_serial(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        mixed, a, b = tokens
        convolved = ckpt_ops.causal_conv1d_prefill(mixed, self.weight, None, self.pools[1], table, activation="silu")
        q, k, v = self._split(convolved)
        return token_serial(q, k, v, a, b, self.pools[0], table, self.raw)

    def reference(self, table: SegmentTable) -> tuple[Tensor, tuple[Tensor, ...]]:
        mixed, a, b = self.tokens
        convolved, histories = causal_conv1d_prefill_reference(
            mixed, self.weight, None, self.pools[1], table, activation="silu"
        )
        q, k, v = self._split(convolved)
        decay = -self.raw.a_log.double().exp() * softplus(a.double() + self.raw.dt_bias)
        out, states = gdn_prefill_reference(q, k, v, decay, b.double().sigmoid(), self.pools[0], table)
        return out, (states, histories)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        key_dim = shape.heads_k * shape.dim
        q, k, v = mixed.split([key_dim, key_dim, shape.heads_v * shape.dim], dim=-1)
        return q.unflatten(-1, (-1, shape.dim)), k.unflatten(-1, (-1, shape.dim)), v.unflatten(-1, (-1, shape.dim))


def make_part(shape: Shape, num_tokens: int, num_slots: int, device: torch.device, seed: int) -> Part:
    """The part that ``shape`` describes, with random inputs and pools."""
    return (Layer if shape.conv_width else DeltaRule)(shape, num_tokens, num_slots, device, seed)


def _chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, table: SegmentTable
) -> Tensor:
    op = ckpt_ops.two_phase_gdn_prefill if table.num_phases > 1 else ckpt_ops.gdn_prefill
    return op(q, k, v, g, beta, states, table)

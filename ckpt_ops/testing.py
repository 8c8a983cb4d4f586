"""Inputs, pools and error budgets that tests and benchmarks share.

Errors are relative in norm, ``|result - reference| / |reference|``, against the float64 recurrence. A budget is derived
from what the computation rounds, never fitted to a result, and is quoted when it is missed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True, slots=True)
class DeltaRuleInputs:
    """Token tensors of one packed batch: q, k ``[T, H_k, D_k]``, v ``[T, H_v, D_v]``, g, beta ``[T, H_v]`` fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def rows(self, start: int, stop: int) -> DeltaRuleInputs:
        """The tokens ``start:stop``, copied, so that their alignment is that of a fresh batch."""
        return DeltaRuleInputs(*(x[start:stop].clone() for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order in which every op takes them."""
        return self.q, self.k, self.v, self.g, self.beta

    def to(self, device: torch.device | str) -> DeltaRuleInputs:
        """A copy on ``device``."""
        return DeltaRuleInputs(*(x.to(device) for x in self.tensors()))


def make_delta_rule_inputs(
    tokens: int,
    heads_k: int = 2,
    heads_v: int = 4,
    dim_k: int = 64,
    dim_v: int = 64,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    correlated: bool = False,
    gate: float | None = None,
) -> DeltaRuleInputs:
    """Random inputs as a model makes them.

    Args:
        correlated: keys and queries after SiLU, as behind the convolution, plus a common direction: positively
            correlated, which makes the triangular systems badly conditioned.
        gate: log decay of every token; by default ``-exp(A) softplus(a)`` of random ``a`` and ``A`` per head.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = normal(tokens, heads_k, dim_k), normal(tokens, heads_k, dim_k)
    if correlated:
        q, k = torch.nn.functional.silu(q), torch.nn.functional.silu(k) + 0.5
    decay = -torch.exp(normal(heads_v) - 2) * torch.nn.functional.softplus(normal(tokens, heads_v) - 1)
    inputs = DeltaRuleInputs(
        q.to(dtype), k.to(dtype), normal(tokens, heads_v, dim_v).to(dtype), decay, normal(tokens, heads_v).sigmoid()
    )
    return inputs if gate is None else replace(inputs, g=torch.full_like(decay, gate))


def make_pool(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1, used: set[int] | None = None) -> Tensor:
    """A random pool; slots outside ``used`` hold NaN, so that reading one of them shows."""
    pool = (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.5).to(dtype)
    if used is not None:
        unused = [slot for slot in range(shape[0]) if slot not in used]
        pool[unused] = torch.nan
    return pool


def relative_error(result: Tensor, reference: Tensor) -> float:
    """``|result - reference| / |reference|`` in the Frobenius norm, in fp64; 0 for two empty tensors."""
    difference = (result.double().cpu() - reference.double().cpu()).norm()
    return float(difference / reference.double().cpu().norm().clamp_min(1e-30)) if result.numel() else 0.0


def delta_rule_budget(
    dtype: torch.dtype, pool_dtype: torch.dtype = torch.float32, *, rounds_operands: bool, hard: bool = False
) -> float:
    """Largest relative error allowed of outputs and states.

    A rounding to nearest costs 0.41 unit roundoffs in norm. ``rounds_operands`` (the GPU kernels): seven independent
    roundings to ``dtype`` a chunk (state, T, A, error, update, weighted update, result), 1.1 in all, and 3 with what
    the state carries on; otherwise the result alone, at most 1. fp32 sums of up to 256 terms add 16 roundoffs.
    ``hard``: correlated keys, which lose up to a factor of 4 in the triangular solve.
    """
    narrow = (3 if rounds_operands else 1) * _UNIT_ROUNDOFF[dtype] + _UNIT_ROUNDOFF[pool_dtype]
    sums = 16 * _UNIT_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32]
    return (narrow + sums) * (4 if hard else 1)


def gate_budget(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Largest relative error allowed of each ``g``, ``[T, H_v]`` in fp64: the sum ``x = a + dt_bias`` and, before the
    exponential, its product with ``log2 e`` are rounded, ``|x|`` roundoffs each; so is ``a_log``'s product; and four
    roundoffs for each of two exponentials, a series, a quotient and the product."""
    x = a.double() + dt_bias.double()
    return (2 * x.abs() + a_log.double().abs() + 20) * _UNIT_ROUNDOFF[torch.float32]


def conv_budget(dtype: torch.dtype, pool_dtype: torch.dtype) -> float:
    """Largest relative error allowed of the convolution's output: one rounding of the result and of the history, and
    fp32 sums of up to 9 terms before a SiLU that can double their error."""
    sums = 8 * _UNIT_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32]
    return _UNIT_ROUNDOFF[dtype] + _UNIT_ROUNDOFF[pool_dtype] + sums

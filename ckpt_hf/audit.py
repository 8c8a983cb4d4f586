"""A second opinion on cache hits: one in so many is computed again from scratch, outside of all slots, and compared."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from .errors import CheckpointRuntimeError, CheckpointValueError
from .pools import StatePools
from .requests import Request

logger = logging.getLogger(__name__)


class AuditError(CheckpointRuntimeError):
    """A hit gave other logits or states than the same prompt from scratch."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """One hit, compared.

    Attributes:
        request_id: the scheduler's number of the request, as in a trace.
        prompt_tokens, cached_tokens: lengths of the prompt and of what came from the checkpoint.
        logits_error: relative error (norm of the difference over the norm) of the logits after the prompt.
        state_error: the largest relative error of a recurrent or convolution state after the prompt; None if the
            request had given its state up by then.
        worst_layer: the layer of ``state_error``.
        tolerance: what :func:`audit_tolerance` allows.
    """

    request_id: int
    prompt_tokens: int
    cached_tokens: int
    logits_error: float
    state_error: float | None
    worst_layer: int | None
    tolerance: float

    @property
    def largest_error(self) -> float:
        """The larger one of the two; infinite where a value is not a number."""
        return max(self.logits_error, self.state_error or 0.0)

    @property
    def passed(self) -> bool:
        """Whether rounding can explain the difference."""
        return self.largest_error <= self.tolerance


def audit_tolerance(dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> float:
    """The relative error up to which a difference passes as rounding.

    A hit and a computation from scratch do the same sums in another order: the chunk grid of the recurrence starts anew
    at the boundary. So they differ by rounding alone: 1e-6 in float32 and 0.04 in bfloat16 on a small model of four
    layers. A state that belongs to another prompt, is stale or was never written is off by a sizeable part of itself,
    0.3 and more there. The tolerance lies between the two: 8192 units of the coarser dtype, but never more than 0.1,
    which is 1e-3 in float32 and 0.1 in half precision and where float32 products are rounded to TF32.
    """
    units = [torch.finfo(dtype).eps, torch.finfo(state_dtype).eps]
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        units.append(2.0**-10)
    return min(8192 * max(units), 0.1)


class Auditor:
    """Compares one hit in ``every`` with the same prompt computed by transformers' own layers and cache.

    An audited request costs a whole prefill of its prompt more, within the step that completed it.

    Args:
        model: the patched model.
        every: hits of which one is compared; which one is drawn, so that no period of the traffic is missed.
        tolerance: largest relative error that passes; None for :func:`audit_tolerance`.
        on_failure: ``"log"`` an error and go on, or ``"raise"`` :class:`AuditError`, which ends that request.
        seed: of the draw.

    Attributes:
        hits, audited, failed, skipped: counts; an audit is skipped when memory is short for it.
        largest_error: of all audits.
        last: the latest report.

    Raises:
        CheckpointValueError: an argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        every: int = 1000,
        *,
        tolerance: float | None = None,
        on_failure: Literal["log", "raise"] = "log",
        seed: int = 0,
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise CheckpointValueError(f"every must be an int >= 1, got {every!r}")
        if tolerance is not None and not tolerance > 0:
            raise CheckpointValueError(f"tolerance must be None or above 0, got {tolerance!r}")
        if on_failure not in ("log", "raise"):
            raise CheckpointValueError(f"on_failure must be 'log' or 'raise', got {on_failure!r}")
        self._model, self._every, self._tolerance, self._on_failure = model, every, tolerance, on_failure
        self._random = random.Random(seed)
        self._chosen = self._random.randrange(every)
        self.hits = self.audited = self.failed = self.skipped = 0
        self.largest_error = 0.0
        self.last: AuditReport | None = None

    def check(
        self,
        answered: Iterable[tuple[Request, Tensor]],
        states: StatePools,
        fail: Callable[[Request, AuditError], None],
    ) -> None:
        """Look at the requests of a step that has committed.

        Args:
            answered: each request that has logits ``[V]`` now; those that have generated already are passed over.
            states: the pools of the model.
            fail: ends a request; called with ``on_failure="raise"``.
        """
        for request, logits in answered:
            if not request.cached_tokens or len(request.token_ids) != request.prompt_tokens:
                continue
            chosen = self.hits % self._every == self._chosen
            self.hits += 1
            if self.hits % self._every == 0:
                self._chosen = self._random.randrange(self._every)
            if chosen and (report := self._try(request, logits, states)) is not None and not report.passed:
                self.failed += 1
                error = AuditError(_describe(report))
                logger.error("%s", error)
                if self._on_failure == "raise":
                    fail(request, error)

    def _try(self, request: Request, logits: Tensor, states: StatePools) -> AuditReport | None:
        try:
            self.last = self._compare(request, logits, states)
        except torch.OutOfMemoryError:
            self.skipped += 1
            logger.warning("no memory to audit request %d", request.request_id)
            return None
        self.audited += 1
        self.largest_error = max(self.largest_error, self.last.largest_error)
        return self.last

    @torch.no_grad()
    def _compare(self, request: Request, logits: Tensor, states: StatePools) -> AuditReport:
        model = self._model
        ids = torch.tensor([request.token_ids], device=model.device)
        cache = DynamicCache(config=model.config)
        expected = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        errors: dict[int, float] = {}
        if request.state_in_slot and request.slot is not None:
            for pools, name in ((states.recurrent, "recurrent_states"), (states.conv, "conv_states")):
                for layer, pool in pools.items():
                    right = getattr(cache.layers[layer], name)[0][0]
                    error = _relative(pool[request.slot], right[..., -pool.shape[-1] :])
                    errors[layer] = max(errors.get(layer, 0.0), error)
        worst = max(errors, key=lambda layer: errors[layer], default=None)
        tolerance = self._tolerance
        if tolerance is None:
            state_dtype = next(iter(states.recurrent.values())).dtype
            tolerance = audit_tolerance(model.dtype, state_dtype)
        return AuditReport(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            logits_error=_relative(logits, expected),
            state_error=None if worst is None else errors[worst],
            worst_layer=worst,
            tolerance=tolerance,
        )


def _relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.float() - expected.float()).norm()
    error = float(difference / expected.float().norm().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error


def _describe(report: AuditReport) -> str:
    state = ""
    if report.state_error is not None:
        state = f", states by up to {report.state_error:.1e} (layer {report.worst_layer})"
    return (
        f"the hit of request {report.request_id} ({report.cached_tokens} of {report.prompt_tokens} tokens cached) gave "
        f"logits that differ from those computed from scratch by {report.logits_error:.1e}{state}; rounding explains "
        f"{report.tolerance:.1e}"
    )

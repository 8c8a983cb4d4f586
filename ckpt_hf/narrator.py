"""Tells whoever listens what the scheduler does."""

from __future__ import annotations

from typing import Any

from .checkpoint import Checkpoint, CheckpointLimits
from .events import Emit, Event, EventKind, short_key
from .plan import StepPlan
from .requests import Request


class Narrator:
    """Emits events; without a listener it does nothing.

    Args:
        emit: hears of everything that happens.

    Attributes:
        step: number of the current step.
    """

    def __init__(self, emit: Emit | None) -> None:
        self.emit = emit
        self.step = 0

    def tell(self, kind: EventKind, request: Request | None, **data: Any) -> None:
        """One event about ``request``, or about the whole."""
        if self.emit is not None:
            self.emit(Event(kind, self.step, request.request_id if request is not None else None, data))

    def tell_of(self, kind: EventKind, request: Request | None, checkpoint: Checkpoint) -> None:
        """One event about a checkpoint."""
        if self.emit is not None:
            self.tell(kind, request, key=short_key(checkpoint.key), tokens=len(checkpoint.token_ids))

    def tell_submitted(self, request: Request) -> None:
        """A request has arrived."""
        boundaries = list(request.boundaries)
        self.tell(
            "submitted",
            request,
            prompt_tokens=request.prompt_tokens,
            boundaries=boundaries,
            priority=request.priority,
        )

    def tell_plan(self, plan: StepPlan) -> None:
        """A step begins."""
        if self.emit is None:
            return
        self.tell("step", None, phase="begin", tokens=plan.num_tokens)
        for piece in plan.pieces:
            self.tell("piece", piece.request, start=piece.start, stop=piece.stop, slot=piece.destination)
        if plan.decodes:
            self.tell("decode", None, count=len(plan.decodes), requests=[r.request_id for r in plan.decodes])

    def tell_end(self, tokens: int, slots: int, rows: int, limits: CheckpointLimits) -> None:
        """A step is over: what it computed, and how many slots and rows are in use after it."""
        self.tell("slots", None, used=slots, bytes=slots * limits.bytes_per_slot + rows * limits.bytes_per_token)
        self.tell("step", None, phase="end", tokens=tokens)

"""What to give up, and in which order, when a step has found no memory."""

from __future__ import annotations

import torch

from .draft import STATE_CHUNK_TOKENS
from .memory import StepMemory
from .packed_step import requests_of
from .plan import StepPlan
from .requests import Request
from .scheduler import Scheduler


def is_device_failure(error: BaseException) -> bool:
    """Whether the device itself has failed, after which no result on it can be trusted."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


class Recovery:
    """Makes steps smaller while memory is short, and larger again when they succeed."""

    def __init__(self) -> None:
        self._budget: int | None = None
        self._evicted = False

    def succeeded(self, scheduler: Scheduler) -> None:
        """A step ran: allow the next ones to be larger again."""
        self._evicted = False
        if self._budget is not None:
            scheduler.max_batch_tokens = min(2 * scheduler.max_batch_tokens, self._budget)
            if scheduler.max_batch_tokens == self._budget:
                self._budget = None

    def make_room(self, memory: StepMemory, plan: StepPlan) -> Request | None:
        """After the undone step ``plan``: give up what costs least.

        First the checkpoints that nobody needs, then half of the tokens of a step, then a request.

        Returns:
            A request that must end; None when trying again can help.
        """
        scheduler, victim = memory.scheduler, None
        # A request that waits holds no memory, so what the step took beyond the pools is free again.
        if not self._evicted and len(memory.index):
            self._evicted = True
            memory.index.clear()
        elif (tokens := min(plan.num_tokens, scheduler.max_batch_tokens)) > STATE_CHUNK_TOKENS and plan.pieces:
            self._budget = self._budget or scheduler.max_batch_tokens
            scheduler.max_batch_tokens = max(STATE_CHUNK_TOKENS, tokens // 2)
        else:
            victim = min(requests_of(plan), key=lambda r: (r.priority, -r.request_id))
        memory.trim()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return victim

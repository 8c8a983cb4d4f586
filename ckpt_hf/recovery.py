"""What to give up, and in which order, when a step has found no memory."""

from __future__ import annotations

from collections.abc import Collection

import torch

from .draft import STATE_CHUNK_TOKENS
from .memory import StepMemory
from .packed_step import requests_of
from .plan import StepPlan
from .requests import Request


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

    def succeeded(self, memory: StepMemory) -> None:
        """A step ran: allow the next ones to be larger again."""
        self._evicted = False
        memory.running.relax()
        scheduler = memory.scheduler
        if self._budget is not None:
            scheduler.max_batch_tokens = min(2 * scheduler.max_batch_tokens, self._budget)
            if scheduler.max_batch_tokens == self._budget:
                self._budget = None

    def make_room(self, memory: StepMemory, plan: StepPlan, lockstep: Collection[Request]) -> Request | None:
        """After the undone step ``plan``: give up what costs least.

        First the checkpoints that nobody needs, then half of the tokens of a step, then half of the requests that run
        at once, then a request.

        Args:
            memory: where it was short; all requests of the step wait again and hold nothing.
            plan: the step.
            lockstep: requests that wait for each other, of which no half can run.

        Returns:
            A request that must end; None when trying again can help.
        """
        scheduler, victim = memory.scheduler, None
        served = requests_of(plan)
        if not self._evicted and memory.index.evict_one():
            self._evicted = True
            while memory.index.evict_one():
                pass
        elif (tokens := min(plan.num_tokens, scheduler.max_batch_tokens)) > STATE_CHUNK_TOKENS and plan.pieces:
            self._budget = self._budget or scheduler.max_batch_tokens
            scheduler.max_batch_tokens = max(STATE_CHUNK_TOKENS, tokens // 2)
        elif len(served) > 1 and not any(request in lockstep for request in served):
            memory.running.shrink(len(scheduler.running) + len(served) // 2)
        else:
            candidates = [request for request in served if request in lockstep] or served
            victim = min(candidates, key=lambda r: (r.priority, -r.request_id))
        memory.trim()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return victim

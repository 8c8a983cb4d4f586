"""How many requests may run at once: what the caller allows, rows that advance together on top, less when short."""

from __future__ import annotations

from .admission import AdmissionLimits
from .scheduler import Scheduler


class RunningLimit:
    """Tells the scheduler's admission what may run now.

    Args:
        scheduler: whose limits these are.
        max_running: the caller's limit, or None.
        memory_bytes: the caller's limit of bytes, or None.
    """

    def __init__(self, scheduler: Scheduler, max_running: int | None, memory_bytes: int | None) -> None:
        self._scheduler = scheduler
        self._given = max_running
        self._bytes = memory_bytes
        self._lockstep = 0
        self._shrunk: int | None = None
        self._apply()

    def set_lockstep(self, count: int) -> None:
        """So many rows wait for each other and so must all be let in."""
        if count != self._lockstep:
            self._lockstep = count
            self._apply()

    def shrink(self, running: int) -> None:
        """Memory was short: no more than ``running`` for now."""
        self._shrunk = max(1, running)
        self._apply()

    def relax(self) -> None:
        """A step ran: one more may try."""
        if self._shrunk is not None:
            self._shrunk += 1
            if self._shrunk > len(self._scheduler.requests):
                self._shrunk = None
            self._apply()

    def _apply(self) -> None:
        limit = None if self._given is None else self._given + self._lockstep
        if self._shrunk is not None:
            limit = self._shrunk if limit is None else min(limit, self._shrunk)
        self._scheduler.admission.limits = AdmissionLimits(limit, self._bytes)

"""Memory that running requests may take, and what makes room for them: checkpoints that nobody needs.

Keys and values of a request that is let in are set aside up to the end of its prompt, so prompts never run out of
memory half way; only answers grow beyond, and then the scheduler preempts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import CheckpointValueError
from .index import CheckpointIndex
from .requests import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What may run at once; None sets no limit.

    Attributes:
        max_running: requests that hold a slot for their own state.
        memory_bytes: states, keys and values of requests and checkpoints together (without the logits that
            checkpoints keep).
    """

    max_running: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise CheckpointValueError(f"{name} must be None or an int >= 1, got {value!r}")


class Admission:
    """Counts the bytes that are taken and promised within one step.

    Args:
        index: checkpoints, whose slots and rows count as well, and can be given up.
        limits: what may run.
    """

    def __init__(self, index: CheckpointIndex, limits: AdmissionLimits) -> None:
        self.index = index
        self.limits = limits
        self._promised = 0

    @property
    def used(self) -> int:
        """Bytes of all slots and rows that have an owner."""
        costs = self.index.limits
        return self.index.slots.used * costs.bytes_per_slot + self.index.kv_rows.used * costs.bytes_per_token

    def begin(self, running: Iterable[Request]) -> None:
        """A step begins: what the prompts under way still need is set aside."""
        self._promised = 0
        if self.limits.memory_bytes is not None:
            prompts = (r for r in running if r.status is RequestStatus.PREFILL)
            self._promised = sum(self._bytes(int(r.slot is None), r.prefill_stop - r.position) for r in prompts)

    def full(self, running: int) -> bool:
        """Whether no more than ``running`` requests may run."""
        return self.limits.max_running is not None and running >= self.limits.max_running

    def alone(self, request: Request) -> int:
        """Bytes that ``request`` takes with nothing to start from, up to its first new token."""
        return self._bytes(1, request.prefill_stop + 1)

    def admit(self, request: Request, position: int, running: int, desperate: bool) -> bool:
        """Set aside what ``request`` needs from ``position`` on, and a token for each one that runs.

        Args:
            request: about to start.
            position: tokens that a checkpoint spares it.
            running: requests that run already.
            desperate: nobody else runs, so checkpoints that others wait for may go as well.
        """
        needed = self._bytes(1, request.prefill_stop - position)
        if not self.make_room(needed + self._bytes(0, running + 1), desperate):
            return False
        self._promised += needed
        return True

    def make_room(self, needed: int, desperate: bool = False) -> bool:
        """Evict until ``needed`` bytes more would fit; False when they do not."""
        limit = self.limits.memory_bytes
        if limit is None:
            return True
        while self.used + self._promised + needed > limit:
            if not self.index.evict_one(desperate):
                return False
        return True

    def room_for(self, slots: int, tokens: int = 0, desperate: bool = False) -> bool:
        """Whether ``slots`` slots and ``tokens`` rows can be had beyond what is set aside, at checkpoints' cost."""
        return self.make_room(self._bytes(slots, tokens), desperate)

    def took(self, slots: int, tokens: int) -> None:
        """What was set aside has been taken."""
        self._promised -= self._bytes(slots, tokens)

    def _bytes(self, slots: int, tokens: int) -> int:
        costs = self.index.limits
        return slots * costs.bytes_per_slot + tokens * costs.bytes_per_token

"""Which checkpoint goes first: least recently used, weighed by what a hit saves for each byte it takes.

The order is that of GreedyDual: a use sets ``worth`` to the worth of the last one that went plus the tokens saved per
byte. Among equals that is least recently used; one that saves twice as much survives about twice as many others.
"""

from __future__ import annotations

import heapq

from .checkpoint import Checkpoint, CheckpointStatus, Retention


class EvictionQueue:
    """Checkpoints that may go. Entries of those that may not any more are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Retention, float, int, int, Checkpoint]] = []
        self._floor = dict.fromkeys(Retention, 0.0)
        self._entries = 0
        self._clock = 0

    def touch(self, checkpoint: Checkpoint, saved: int, size: int) -> None:
        """``checkpoint`` was just used.

        Args:
            checkpoint: a ready one.
            saved: tokens that a hit need not compute.
            size: bytes that it takes.
        """
        self._clock += 1
        checkpoint.last_used = self._clock
        checkpoint.worth = self._floor[checkpoint.retention] + saved / max(size, 1)
        self.offer(checkpoint)

    def offer(self, checkpoint: Checkpoint) -> None:
        """``checkpoint`` may go from now on. An older entry of it counts no more."""
        self._entries += 1
        checkpoint.queued = self._entries
        entry = (checkpoint.retention, checkpoint.worth, checkpoint.last_used, self._entries, checkpoint)
        heapq.heappush(self._heap, entry)

    def first(self) -> Checkpoint | None:
        """The next one to go, or None."""
        while self._heap:
            *_, entry, checkpoint = self._heap[0]
            if entry == checkpoint.queued and checkpoint.status is CheckpointStatus.READY:
                return checkpoint
            heapq.heappop(self._heap)
        return None

    def skip(self) -> None:
        """The first one may not go; :meth:`offer` it when it may."""
        heapq.heappop(self._heap)[-1].queued = 0

    def gone(self, checkpoint: Checkpoint) -> None:
        """``checkpoint`` was evicted: the others are worth that much less."""
        kind = checkpoint.retention
        self._floor[kind] = max(self._floor[kind], checkpoint.worth)

    def tidy(self, alive: int) -> None:
        """Throw away dead entries once they outnumber the ``alive`` checkpoints."""
        if len(self._heap) > 64 + 4 * alive:
            self._heap = [e for e in self._heap if e[-2] == e[-1].queued and e[-1].status is CheckpointStatus.READY]
            heapq.heapify(self._heap)

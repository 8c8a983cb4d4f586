"""Checkpoints by key: their states, leases, and which of them stay.

A checkpoint is absent, unready (a request is computing it) or ready. Its identity is its key, never its slot; on a hit
the stored token ids are compared, so that not even a digest collision can hand out another prompt's states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .errors import CheckpointRuntimeError
from .kv import KVRows, KVSegment
from .slots import SlotAllocator


class CheckpointStatus(Enum):
    """States of a checkpoint; ``ABSENT`` is the state of one that left the index."""

    UNREADY = "unready"
    READY = "ready"
    ABSENT = "absent"


CHECKPOINT_TRANSITIONS = {
    CheckpointStatus.UNREADY: {CheckpointStatus.READY, CheckpointStatus.ABSENT},
    CheckpointStatus.READY: {CheckpointStatus.ABSENT},
    CheckpointStatus.ABSENT: set(),
}


@dataclass(eq=False, slots=True)
class Checkpoint:
    """Everything needed to go on after ``token_ids``.

    ``slot`` and ``kv`` are None until the producer's first tokens are scheduled; ``logits`` are those after the last
    token, for prompts that end at the boundary, and None until the checkpoint is ready.
    """

    key: bytes
    token_ids: tuple[int, ...]
    producer: int
    ephemeral: bool = False
    status: CheckpointStatus = CheckpointStatus.UNREADY
    slot: int | None = None
    kv: KVSegment | None = None
    logits: Any = None
    leases: int = 0
    last_used: int = 0

    def move(self, status: CheckpointStatus) -> None:
        """Change the status.

        Raises:
            CheckpointRuntimeError: the transition is not in ``CHECKPOINT_TRANSITIONS``.
        """
        if status not in CHECKPOINT_TRANSITIONS[self.status]:
            raise CheckpointRuntimeError(
                f"checkpoint {self.key.hex()[:12]} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status


@dataclass(slots=True)
class CheckpointLimits:
    """What may stay between calls: number of checkpoints and bytes, and how many bytes each part takes."""

    slots: int | None
    bytes: int | None
    bytes_per_slot: int
    bytes_per_token: int
    bytes_of_logits: Callable[[Any], int]


@dataclass(slots=True)
class CheckpointIndex:
    """The checkpoints that exist, least recently used first out.

    ``demand`` counts, by key, the requests that will still start from a checkpoint; a checkpoint in demand or under
    lease is never evicted.
    """

    slots: SlotAllocator
    kv_rows: KVRows
    limits: CheckpointLimits
    demand: Counter[bytes] = field(default_factory=Counter)
    evictions: int = 0
    _by_key: dict[bytes, Checkpoint] = field(default_factory=dict)
    _evicted: dict[bytes, None] = field(default_factory=dict)
    _clock: int = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that are not absent."""
        return tuple(self._by_key.values())

    def find(self, key: bytes, token_ids: Sequence[int]) -> Checkpoint | None:
        """The checkpoint of exactly these ids, or None."""
        checkpoint = self._by_key.get(key)
        if checkpoint is None or checkpoint.token_ids != tuple(token_ids):
            return None
        return checkpoint

    def why_absent(self, key: bytes) -> str:
        """Reason for a miss in a user's words."""
        return "evicted" if key in self._evicted else "never seen"

    def reserve(self, key: bytes, token_ids: Sequence[int], producer: int, ephemeral: bool) -> Checkpoint | None:
        """A new unready checkpoint, or None when another one (of other ids) sits at the same key."""
        if key in self._by_key:
            return None
        checkpoint = Checkpoint(key, tuple(token_ids), producer, ephemeral)
        self._by_key[key] = checkpoint
        return checkpoint

    def touch(self, checkpoint: Checkpoint) -> None:
        """Mark as just used."""
        self._clock += 1
        checkpoint.last_used = self._clock

    def publish(self, checkpoint: Checkpoint) -> None:
        """The step that wrote the states has committed: others may read them."""
        if checkpoint.slot is None or checkpoint.kv is None:
            raise CheckpointRuntimeError(f"checkpoint {checkpoint.key.hex()[:12]} has no states to publish")
        checkpoint.move(CheckpointStatus.READY)
        self._evicted.pop(checkpoint.key, None)
        self.touch(checkpoint)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` absent and free what it holds.

        Raises:
            CheckpointRuntimeError: somebody still holds a lease on it.
        """
        if checkpoint.leases:
            raise CheckpointRuntimeError(f"checkpoint {checkpoint.key.hex()[:12]} was dropped under a lease")
        checkpoint.move(CheckpointStatus.ABSENT)
        del self._by_key[checkpoint.key]
        if checkpoint.slot is not None:
            self.slots.release(checkpoint.slot, checkpoint.key)
        if checkpoint.kv is not None:
            self.kv_rows.release(checkpoint.kv)
        checkpoint.slot = checkpoint.kv = checkpoint.logits = None

    def bytes_used(self) -> int:
        """Bytes of the ready checkpoints: states, logits, and keys and values that would not exist without them."""
        ready = [c for c in self._by_key.values() if c.status is CheckpointStatus.READY]
        segments: set[KVSegment] = set()
        for checkpoint in ready:
            segment = checkpoint.kv
            while segment is not None and segment not in segments:
                segments.add(segment)
                segment = segment.parent
        return (
            len(ready) * self.limits.bytes_per_slot
            + sum(map(len, segments)) * self.limits.bytes_per_token
            + sum(self.limits.bytes_of_logits(c.logits) for c in ready if c.logits is not None)
        )

    def enforce_limits(self) -> None:
        """Evict ready checkpoints that nobody needs until the limits hold: ephemeral ones, then the oldest used."""
        candidates = [
            c
            for c in self._by_key.values()
            if c.status is CheckpointStatus.READY and not c.leases and not self.demand[c.key]
        ]
        candidates.sort(key=lambda c: (not c.ephemeral, c.last_used))
        for checkpoint in candidates:
            if not checkpoint.ephemeral and self._within_limits():
                return
            self._evict(checkpoint)

    def clear(self) -> None:
        """Drop every ready checkpoint that is not under lease (the model changed, or the user asked for it)."""
        for checkpoint in self.checkpoints:
            if checkpoint.status is CheckpointStatus.READY and not checkpoint.leases:
                self._evict(checkpoint)

    def _evict(self, checkpoint: Checkpoint) -> None:
        self.drop(checkpoint)
        if not checkpoint.ephemeral:
            self.evictions += 1
            self._evicted[checkpoint.key] = None
            if len(self._evicted) > 65536:
                self._evicted.pop(next(iter(self._evicted)))

    def _within_limits(self) -> bool:
        ready = sum(c.status is CheckpointStatus.READY for c in self._by_key.values())
        if self.limits.slots is not None and ready > self.limits.slots:
            return False
        return self.limits.bytes is None or self.bytes_used() <= self.limits.bytes

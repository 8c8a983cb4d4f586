"""Checkpoints by key: who computes them, and which of them stay.

A checkpoint is absent, unready (a request is computing it) or ready. Its identity is its key, never its slot; on a hit
the stored token ids are compared, so that not even a digest collision can hand out another prompt's states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from .checkpoint import Checkpoint, CheckpointLimits, CheckpointStatus, Retention
from .errors import CheckpointRuntimeError
from .eviction import EvictionQueue
from .kept import KeptBytes
from .keys import KeyScope
from .kv import KVRows
from .prefixes import PrefixIndex
from .reasons import Reason
from .slots import SlotAllocator

__all__ = ["Checkpoint", "CheckpointIndex", "CheckpointLimits", "CheckpointStatus"]

_REMEMBERED_EVICTIONS = 65536


class CheckpointIndex:
    """The checkpoints that exist.

    ``demand`` counts, by key, the requests that will still start from a checkpoint; one in demand, under lease or
    pinned is never evicted by :meth:`enforce_limits`.

    Args:
        slots, kv_rows: owners of the states and of the keys and values.
        limits: what may stay when nobody needs it.
    """

    def __init__(self, slots: SlotAllocator, kv_rows: KVRows, limits: CheckpointLimits) -> None:
        self.slots = slots
        self.kv_rows = kv_rows
        self.limits = limits
        self.demand: Counter[bytes] = Counter()
        self.prefixes = PrefixIndex()
        self.evictions = 0
        self.on_evict: Callable[[Checkpoint], None] | None = None
        self._by_key: dict[bytes, Checkpoint] = {}
        self._by_content: dict[bytes, set[Checkpoint]] = {}
        self._evicted: dict[bytes, None] = {}
        self._queue = EvictionQueue()
        self._kept = KeptBytes(limits)

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that are not absent."""
        return tuple(self._by_key.values())

    def get(self, key: bytes) -> Checkpoint | None:
        """The checkpoint at ``key``, whatever its tokens."""
        return self._by_key.get(key)

    def find(self, key: bytes, token_ids: Sequence[int]) -> Checkpoint | None:
        """The checkpoint of exactly these ids, or None."""
        checkpoint = self._by_key.get(key)
        return checkpoint if checkpoint is not None and checkpoint.token_ids == tuple(token_ids) else None

    def why_absent(self, key: bytes, content: bytes = b"", scope: KeyScope | None = None) -> Reason:
        """Reason for a miss. ``Reason.OTHER_CALLER`` is for the operator alone."""
        if key in self._evicted:
            return Reason.EVICTED
        salts = {c.scope.salt for c in self._by_content.get(content, ()) if c.scope and c.scope != scope}
        if scope is None or not salts:
            return Reason.NEVER_SEEN
        return Reason.OTHER_ADAPTER if scope.salt in salts else Reason.OTHER_CALLER

    def reserve(
        self,
        key: bytes,
        token_ids: Sequence[int],
        producer: int,
        retention: Retention = Retention.DECLARED,
        scope: KeyScope | None = None,
        content: bytes = b"",
    ) -> Checkpoint | None:
        """A new unready checkpoint, or None when another one (of other ids) sits at the same key."""
        if key in self._by_key:
            return None
        checkpoint = Checkpoint(key, tuple(token_ids), producer, retention, scope, content)
        self._by_key[key] = checkpoint
        return checkpoint

    def publish(self, checkpoint: Checkpoint) -> None:
        """The step that wrote the states has committed: others may read them."""
        if checkpoint.slot is None or checkpoint.kv is None:
            raise CheckpointRuntimeError(f"checkpoint {checkpoint.key.hex()[:12]} has no states to publish")
        checkpoint.move(CheckpointStatus.READY)
        self._evicted.pop(checkpoint.key, None)
        self._kept.add(checkpoint)
        self.prefixes.add(checkpoint)
        if checkpoint.content:
            self._by_content.setdefault(checkpoint.content, set()).add(checkpoint)
        self.touch(checkpoint)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Make ``checkpoint`` absent and free what it holds.

        Raises:
            CheckpointRuntimeError: somebody still holds a lease on it.
        """
        if checkpoint.leases:
            raise CheckpointRuntimeError(f"checkpoint {checkpoint.key.hex()[:12]} was dropped under a lease")
        was_ready = checkpoint.status is CheckpointStatus.READY
        checkpoint.move(CheckpointStatus.ABSENT)
        del self._by_key[checkpoint.key]
        if was_ready:
            self._forget_ready(checkpoint)
        if checkpoint.slot is not None:
            self.slots.release(checkpoint.slot, checkpoint.key)
        if checkpoint.kv is not None:
            self.kv_rows.release(checkpoint.kv)
        checkpoint.slot = checkpoint.kv = checkpoint.logits = None
        checkpoint.pins = 0

    def touch(self, checkpoint: Checkpoint) -> None:
        """Mark as just used."""
        if checkpoint.status is not CheckpointStatus.READY or checkpoint.kv is None:
            return
        self._queue.touch(checkpoint, len(checkpoint.kv), self._kept.alone(checkpoint))
        self._queue.tidy(len(self._by_key))

    def want_kept(self, checkpoint: Checkpoint, retention: Retention) -> None:
        """Keep ``checkpoint`` at least as long as ``retention`` says."""
        if retention > checkpoint.retention:
            checkpoint.retention = retention
            self.touch(checkpoint)

    def lease(self, checkpoint: Checkpoint) -> None:
        """Somebody's next piece reads the states."""
        checkpoint.leases += 1

    def unlease(self, checkpoint: Checkpoint) -> None:
        """The piece has run, or will not."""
        checkpoint.leases -= 1
        self._offer(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep a ready checkpoint until :meth:`unpin`.

        Raises:
            CheckpointRuntimeError: it is not ready, or the pinned ones alone would exceed the limits.
        """
        if checkpoint.status is not CheckpointStatus.READY:
            raise CheckpointRuntimeError(
                f"only a ready checkpoint can be pinned, this one is {checkpoint.status.value}"
            )
        pinned = [*(c for c in self._by_key.values() if c.pins and c is not checkpoint), checkpoint]
        slots, limit, size = self.limits.slots, self.limits.bytes, self._kept.together(pinned)
        if (slots is not None and len(pinned) > slots) or (limit is not None and size > limit):
            raise CheckpointRuntimeError(
                f"{len(pinned)} pinned checkpoints would take {size} bytes; the limits are {slots} checkpoints and "
                f"{limit} bytes"
            )
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Undo one :meth:`pin`; a checkpoint that is gone is left alone."""
        if checkpoint.pins:
            checkpoint.pins -= 1
            self._offer(checkpoint)

    def want(self, key: bytes) -> None:
        """One more request will start from ``key``."""
        self.demand[key] += 1

    def unwant(self, key: bytes) -> None:
        """One request less."""
        self.demand[key] -= 1
        if not self.demand[key]:
            del self.demand[key]
            if (checkpoint := self._by_key.get(key)) is not None:
                self._offer(checkpoint)

    def bytes_used(self) -> int:
        """Bytes of the ready checkpoints: states, logits, and keys and values that would not exist without them."""
        return self._kept.bytes

    def enforce_limits(self) -> None:
        """Evict ready checkpoints that nobody needs until the limits hold, ephemeral ones in any case."""
        while (checkpoint := self._next_victim()) is not None:
            if checkpoint.retention is not Retention.EPHEMERAL and self._within_limits():
                return
            self._evict(checkpoint)

    def evict_one(self, wanted_too: bool = False) -> bool:
        """Give up the ready checkpoint that is worth least; with ``wanted_too`` also one that waiting requests want."""
        victim = self._next_victim()
        if victim is None and wanted_too:
            free = [c for c in self._by_key.values() if c.status is CheckpointStatus.READY and not c.leases + c.pins]
            victim = min(free, key=lambda c: (c.retention, c.worth, c.last_used), default=None)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def clear(self) -> None:
        """Drop every ready checkpoint that is not under lease (the model changed, or the user asked for it)."""
        for checkpoint in self.checkpoints:
            if checkpoint.status is CheckpointStatus.READY and not checkpoint.leases:
                self._evict(checkpoint)

    def _next_victim(self) -> Checkpoint | None:
        while (checkpoint := self._queue.first()) is not None:
            if not self._protected(checkpoint):
                return checkpoint
            self._queue.skip()
        return None

    def _protected(self, checkpoint: Checkpoint) -> bool:
        return bool(checkpoint.leases or checkpoint.pins or checkpoint.key in self.demand)

    def _offer(self, checkpoint: Checkpoint) -> None:
        if checkpoint.status is CheckpointStatus.READY and not checkpoint.queued and not self._protected(checkpoint):
            self._queue.offer(checkpoint)

    def _evict(self, checkpoint: Checkpoint) -> None:
        if self.on_evict is not None:
            self.on_evict(checkpoint)
        self._queue.gone(checkpoint)
        self.drop(checkpoint)
        if checkpoint.retention is not Retention.EPHEMERAL:
            self.evictions += 1
            self._evicted[checkpoint.key] = None
            if len(self._evicted) > _REMEMBERED_EVICTIONS:
                self._evicted.pop(next(iter(self._evicted)))

    def _forget_ready(self, checkpoint: Checkpoint) -> None:
        self._kept.remove(checkpoint)
        self.prefixes.remove(checkpoint)
        if checkpoint.content:
            same = self._by_content[checkpoint.content]
            same.discard(checkpoint)
            if not same:
                del self._by_content[checkpoint.content]

    def _within_limits(self) -> bool:
        slots, limit = self.limits.slots, self.limits.bytes
        few = slots is None or self._kept.checkpoints <= slots
        return few and (limit is None or self._kept.bytes <= limit)

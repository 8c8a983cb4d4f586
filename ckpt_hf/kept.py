"""Bytes of the ready checkpoints, counted as they come and go."""

from __future__ import annotations

from collections.abc import Iterable

from .checkpoint import Checkpoint, CheckpointLimits
from .kv import KVSegment


class KeptBytes:
    """States, logits, and keys and values that would not exist without the checkpoints, each token once."""

    def __init__(self, limits: CheckpointLimits) -> None:
        self._limits = limits
        self._tokens = 0
        self._logits = 0
        self.checkpoints = 0

    @property
    def bytes(self) -> int:
        """Of all that were added and not removed."""
        limits = self._limits
        return self.checkpoints * limits.bytes_per_slot + self._tokens * limits.bytes_per_token + self._logits

    def add(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is ready; its tokens and those before it are kept."""
        self.checkpoints += 1
        self._logits += self._of_logits(checkpoint)
        segment = checkpoint.kv
        while segment is not None:
            segment.kept += 1
            if segment.kept > 1:
                return
            self._tokens += len(segment)
            segment = segment.parent

    def remove(self, checkpoint: Checkpoint) -> None:
        """Undo :meth:`add`."""
        self.checkpoints -= 1
        self._logits -= self._of_logits(checkpoint)
        segment = checkpoint.kv
        while segment is not None:
            segment.kept -= 1
            if segment.kept:
                return
            self._tokens -= len(segment)
            segment = segment.parent

    def alone(self, checkpoint: Checkpoint) -> int:
        """Bytes of the checkpoint and of the tokens after the one before it."""
        own = 0 if checkpoint.kv is None else len(checkpoint.kv)
        return self._limits.bytes_per_slot + own * self._limits.bytes_per_token + self._of_logits(checkpoint)

    def together(self, checkpoints: Iterable[Checkpoint]) -> int:
        """Bytes that would remain if only ``checkpoints`` stayed."""
        chosen = list(checkpoints)
        segments: set[KVSegment] = set()
        for checkpoint in chosen:
            segments.update(checkpoint.kv.path() if checkpoint.kv is not None else ())
        size = len(chosen) * self._limits.bytes_per_slot + sum(map(self._of_logits, chosen))
        return size + sum(map(len, segments)) * self._limits.bytes_per_token

    def _of_logits(self, checkpoint: Checkpoint) -> int:
        return 0 if checkpoint.logits is None else self._limits.bytes_of_logits(checkpoint.logits)

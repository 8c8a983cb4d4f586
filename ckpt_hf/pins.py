"""A prefix that stays cached until its owner lets go of it."""

from __future__ import annotations

from typing import Any

from .checkpoint import Checkpoint, CheckpointStatus
from .runner import ModelRunner


class Pin:
    """Keeps the states after a prefix. Release it, or use it as a context manager.

    It does not outlast what makes every checkpoint useless: other weights, ``ckpt_hf.clear``, ``ckpt_hf.unpatch``.
    """

    def __init__(self, runner: ModelRunner, checkpoint: Checkpoint) -> None:
        self._runner = runner
        self._checkpoint: Checkpoint | None = checkpoint
        self.tokens = len(checkpoint.token_ids)

    @property
    def holds(self) -> bool:
        """Whether the states are still there and kept."""
        with self._runner.lock:
            return self._checkpoint is not None and self._checkpoint.status is CheckpointStatus.READY

    def release(self) -> None:
        """Let the prefix go when memory is short. A second call does nothing."""
        with self._runner.lock:
            checkpoint, self._checkpoint = self._checkpoint, None
            known = checkpoint is not None and self._runner.started
            if known and self._runner.index.get(checkpoint.key) is checkpoint:  # type: ignore[union-attr]
                self._runner.scheduler.unpin(checkpoint)  # type: ignore[arg-type]
                self._runner.index.enforce_limits()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

"""Logits for a caller that runs the steps itself and waits until all of its requests have got theirs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .errors import CheckpointRuntimeError
from .requests import Request
from .runner import ModelRunner
from .steps import run_step


class Collector:
    """The sink of one call's requests."""

    lockstep = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._logits: dict[Request, Tensor] = {}
        self._error: BaseException | None = None

    def receive(self, logits: dict[Request, Tensor]) -> None:
        """Keep them until the caller asks."""
        self._logits.update(logits)

    def lose(self, requests: Sequence[Request], error: BaseException) -> None:
        """The call fails as a whole."""
        self._error = error

    def collect(self, requests: Sequence[Request]) -> list[Tensor]:
        """Run steps until each of ``requests`` has logits ``[V]``, and hand those out.

        Raises:
            CheckpointRuntimeError: nothing can be done for a request that has none.
            Exception: what a step raised that served one of this caller's requests.
        """
        while self._error is None and any(request not in self._logits for request in requests):
            with self._runner.lock:
                # Another thread's step may have served the rest while this one waited for its turn.
                waiting = self._error is None and any(request not in self._logits for request in requests)
                if waiting and not run_step(self._runner):
                    raise CheckpointRuntimeError(
                        "no progress: the requests of this call wait for something that nobody computes"
                    )
        if self._error is not None:
            raise self._error
        return [self._logits.pop(request) for request in requests]

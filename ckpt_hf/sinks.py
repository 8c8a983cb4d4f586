"""Who asked for which request, and so gets its logits or learns of its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from .requests import Request, RequestStatus


class LogitsSink(Protocol):
    """Whoever asks for requests. Both methods are called by the thread that runs the step, under the runner's lock.

    ``lockstep`` says that its requests wait for each other, so that all of them must run at once.
    """

    lockstep: bool

    def receive(self, logits: dict[Request, Tensor]) -> None:
        """Logits ``[V]`` after the newest token of requests of this sink; they may be kept."""

    def lose(self, requests: Sequence[Request], error: BaseException) -> None:
        """These requests have ended because of ``error``."""


class SinkTable:
    """The sink of each request that has not ended; ``lockstep`` are those that wait for each other."""

    def __init__(self) -> None:
        self._sinks: dict[Request, LogitsSink] = {}
        self.lockstep: set[Request] = set()

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def requests(self) -> list[Request]:
        """All requests, in order of arrival."""
        return list(self._sinks)

    def add(self, request: Request, sink: LogitsSink) -> None:
        """From now on ``sink`` serves ``request``."""
        self._sinks[request] = sink
        if sink.lockstep:
            self.lockstep.add(request)

    def remove(self, request: Request) -> None:
        """The request has ended; nobody is told."""
        self._sinks.pop(request, None)
        self.lockstep.discard(request)

    def lose(self, requests: Sequence[Request], error: BaseException) -> None:
        """Tell each sink which of its requests ended because of ``error``."""
        for sink, share in self._shares(requests).items():
            for request in share:
                self.remove(request)
            sink.lose(share, error)

    def hand_out(self, logits: dict[Request, Tensor], on_error: Callable[[Sequence[Request], Exception], None]) -> None:
        """Give each sink the logits of its requests; ``on_error`` hears of a sink that raised and whom it serves."""
        for sink, share in self._shares(list(logits)).items():
            try:
                sink.receive({request: logits[request] for request in share})
            except Exception as error:  # also for those that ended with this step: nobody else would tell them
                on_error(share, error)
            for request in share:
                if request.status is RequestStatus.FINISHED:
                    self.remove(request)

    def _shares(self, requests: Sequence[Request]) -> dict[LogitsSink, list[Request]]:
        shares: dict[LogitsSink, list[Request]] = {}
        for request in requests:
            sink = self._sinks.get(request)
            if sink is not None:
                shares.setdefault(sink, []).append(request)
        return shares

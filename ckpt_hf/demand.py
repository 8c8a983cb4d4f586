"""Which checkpoints the requests will still start from; the index keeps those."""

from __future__ import annotations

from .index import CheckpointIndex
from .requests import Request


class Demand:
    """Keeps ``index.demand``: by key, the number of requests that may still start there."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index

    def take_all(self, request: Request) -> None:
        """Before its first token a request may start from any of its boundaries, also when it starts again."""
        for key in set(request.keys) - request.demanded:
            self._index.want(key)
        request.demanded = set(request.keys)

    def settle(self, request: Request) -> None:
        """What lies behind a request whose state is in its slot is no longer wanted by it."""
        passed = {k for b, k in zip(request.boundaries, request.keys, strict=True) if b <= request.position}
        if request.state_in_slot:
            self.give_up(request, passed & request.demanded)

    def give_up(self, request: Request, keys: set[bytes]) -> None:
        """``request`` will not start from ``keys``."""
        for key in keys:
            self._index.unwant(key)
        request.demanded = request.demanded - keys

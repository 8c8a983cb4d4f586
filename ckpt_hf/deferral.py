"""Who waits for which checkpoint: requests are filed with those who share it, and wait and wake together."""

from __future__ import annotations

from .checkpoint import Checkpoint, CheckpointStatus
from .events import Emit, short_key
from .index import CheckpointIndex
from .narrator import Narrator
from .queues import WaitingRoom
from .reasons import Reason
from .requests import Request, RequestStatus


class Deferral(Narrator):
    """Requests that wait.

    Args:
        index: checkpoints of this model.
        emit: hears of everything that happens.
    """

    def __init__(self, index: CheckpointIndex, emit: Emit | None) -> None:
        super().__init__(emit)
        self.index = index
        self.waiting = WaitingRoom()
        self._requests: dict[int, Request] = {}

    def queue(self, request: Request) -> None:
        """File a waiting request with those who share its deepest checkpoint that exists or that others want too."""
        index = self.index
        key = next((k for k in reversed(request.keys) if index.get(k) is not None or index.demand[k] > 1), None)
        checkpoint = index.get(key) if key is not None else None
        in_the_making = checkpoint is not None and checkpoint.status is CheckpointStatus.UNREADY
        self.waiting.put(request, key, in_the_making)
        if checkpoint is not None and in_the_making:
            self._defer(request, checkpoint)

    def wait_for(self, request: Request, checkpoint: Checkpoint) -> None:
        """``request`` is filed with those who wait for ``checkpoint``."""
        self.waiting.remove(request)
        self.waiting.close(checkpoint.key)
        self.waiting.put(request, checkpoint.key, closed=True)
        self._defer(request, checkpoint)

    def leased(self, checkpoint: Checkpoint, completes: bool) -> None:
        """Somebody computes ``checkpoint``; those who want it wait unless this step completes it."""
        if completes:
            self.waiting.open(checkpoint.key)
        elif (group := self.waiting.close(checkpoint.key)) is not None:
            for request in list(group.members.values()):
                self._defer(request, checkpoint)

    def dropped(self, checkpoint: Checkpoint) -> None:
        """Nobody computes ``checkpoint`` any more: the best of those who want it may start."""
        self.tell_of("dropped", self._requests.get(checkpoint.producer), checkpoint)
        self.waiting.open(checkpoint.key)

    def _defer(self, request: Request, checkpoint: Checkpoint) -> None:
        if request.status is RequestStatus.WAITING:
            request.move(RequestStatus.DEFERRED)
        request.reasons[len(checkpoint.token_ids)] = Reason.UNREADY.value
        producer = self._requests.get(checkpoint.producer)
        if producer is not None:  # whoever is waited for must not be kept waiting by others that come after
            producer.rank = min(producer.rank, request.rank)
        self.tell("deferred", request, key=short_key(checkpoint.key), producer=checkpoint.producer)

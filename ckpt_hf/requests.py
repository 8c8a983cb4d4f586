"""One request from prompt to last token, and the only moves its status may make."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .errors import CheckpointRuntimeError
from .index import Checkpoint
from .kv import KVSegment


class RequestStatus(Enum):
    """Where a request is; ``DEFERRED`` waits for a checkpoint that another request computes."""

    WAITING = "waiting"
    DEFERRED = "deferred"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


REQUEST_TRANSITIONS = {
    RequestStatus.WAITING: {RequestStatus.DEFERRED, RequestStatus.PREFILL, RequestStatus.FINISHED},
    RequestStatus.DEFERRED: {RequestStatus.PREFILL, RequestStatus.FINISHED},
    RequestStatus.PREFILL: {RequestStatus.WAITING, RequestStatus.DECODE, RequestStatus.FINISHED},
    RequestStatus.DECODE: {RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way through the model.

    Args:
        request_id: unique within one scheduler.
        token_ids: prompt without pads and markers; generated tokens are appended.
        boundaries: prefix lengths at which the caller wants a checkpoint, strictly increasing.
        keys: digest of each boundary's prefix.
        ephemeral: boundaries that only serve this call and are not kept after it.
        decode: whether tokens are generated; otherwise only the checkpoints are computed.
    """

    request_id: int
    token_ids: list[int]
    boundaries: tuple[int, ...]
    keys: tuple[bytes, ...]
    ephemeral: frozenset[int] = frozenset()
    decode: bool = True
    status: RequestStatus = RequestStatus.WAITING
    prompt_tokens: int = 0
    position: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    slot: int | None = None
    retired_slot: int | None = None
    state_in_slot: bool = False
    base: Checkpoint | None = None
    kv: KVSegment | None = None
    reserved: dict[int, Checkpoint] = field(default_factory=dict)
    demanded: set[bytes] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)

    def move(self, status: RequestStatus) -> None:
        """Change the status.

        Raises:
            CheckpointRuntimeError: the transition is not in ``REQUEST_TRANSITIONS``.
        """
        if status not in REQUEST_TRANSITIONS[self.status]:
            raise CheckpointRuntimeError(
                f"request {self.request_id} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status

"""One request from prompt to last token, and the only moves its status may make."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

from .checkpoint import Checkpoint, Retention
from .errors import CheckpointRuntimeError, CheckpointValueError
from .keys import TOKEN_BYTES, KeyScope, Media, pack_tokens
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
    RequestStatus.DECODE: {RequestStatus.WAITING, RequestStatus.FINISHED},
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
        soft: boundaries that nobody declared (the end of the prompt); they go before declared ones.
        decode: whether tokens are generated; otherwise only the checkpoints are computed.
        priority: larger ones run first.
        scope: who may share; with it the request may also start where only others have declared a boundary.
        contents: keys of the boundaries in :data:`~ckpt_hf.keys.CONTENT`, to tell why one was missed.
        media: images and videos of the prompt, a part of the keys.
        pins: boundaries whose checkpoints are pinned as soon as they are ready.
        keep_answer: whether the end of the answer becomes a soft checkpoint; needs ``scope``.

    Attributes:
        prompt_tokens: length of the prompt.
        prefill_stop: tokens that prefill computes: the prompt, and after a preemption what had been generated.
        rank: order of arrival, priority and fairness; smaller ones run first.
        stalled_since: step of its last progress.
        pinned: the checkpoints that it has pinned, by those of ``pins``.
        in_step: the step that it is a part of and that has neither committed nor failed.
        finish_reason: why the request has ended, in the words of whoever ended it.
    """

    request_id: int
    token_ids: list[int]
    boundaries: tuple[int, ...]
    keys: tuple[bytes, ...]
    ephemeral: frozenset[int] = frozenset()
    decode: bool = True
    priority: int = 0
    soft: frozenset[int] = frozenset()
    scope: KeyScope | None = None
    contents: tuple[bytes, ...] = ()
    media: Media = ()
    pins: frozenset[int] = frozenset()
    keep_answer: bool = False
    status: RequestStatus = RequestStatus.WAITING
    prompt_tokens: int = 0
    prefill_stop: int = 0
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
    rank: tuple[int, int, int] = (0, 0, 0)
    stalled_since: int = 0
    in_step: int | None = None
    pinned: dict[int, Checkpoint] = field(default_factory=dict)
    finish_reason: str | None = None
    _packed: bytes = b""

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prefill_stop = len(self.token_ids)

    @property
    def has_next_token(self) -> bool:
        """Whether the request decodes and its newest token has not been computed yet."""
        return self.status is RequestStatus.DECODE and self.position == len(self.token_ids) - 1

    def packed(self, stop: int) -> bytes:
        """The first ``stop`` tokens as bytes."""
        size = TOKEN_BYTES * stop
        if len(self._packed) < size:
            self._packed = pack_tokens(self.token_ids[:stop])
        return self._packed[:size]

    def retention(self, boundary: int) -> Retention:
        """How long the checkpoint at ``boundary`` is to stay."""
        if boundary in self.ephemeral:
            return Retention.EPHEMERAL
        return Retention.SOFT if boundary in self.soft else Retention.DECLARED

    def check_new(self) -> None:
        """Raise CheckpointValueError if the prompt is empty, a boundary lies outside it, or the request has run."""
        if not self.token_ids:
            raise CheckpointValueError(f"token_ids of request {self.request_id} are empty; a prompt needs a token")
        if self.status is not RequestStatus.WAITING:
            raise CheckpointValueError(
                f"request {self.request_id} is {self.status.value}; a request can be added once, and only waiting"
            )
        bounds = (0, *self.boundaries, self.prompt_tokens + 1)
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise CheckpointValueError(
                f"boundaries {self.boundaries} of request {self.request_id} must increase and lie between 1 and "
                f"{self.prompt_tokens}"
            )

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

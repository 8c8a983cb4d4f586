"""What becomes of a request: its status, its result, and the answer as text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from transformers import TextStreamer

from .stats import RowReport


class HandleStatus(Enum):
    """Where a request is, in the words of transformers' continuous batching."""

    PENDING = "pending"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come."""
        return self in (HandleStatus.FINISHED, HandleStatus.FAILED, HandleStatus.CANCELLED)


@dataclass(slots=True)
class GenerationOutput:
    """One request's result, with the field names of transformers' ``generate_batch``.

    Attributes:
        request_id: the caller's name for it, or ``req_0``, ``req_1``, ...
        prompt_ids: the prompt without markers.
        generated_tokens: the answer so far, an end token included.
        error: why there is no more, or None.
        status: see :class:`HandleStatus`.
        finish_reason: ``eos``, ``length``, ``stop`` (a criterion of the caller's), ``cancelled``, ``failed`` or
            ``shutdown``; None while it runs.
        created_time: ``time.perf_counter()`` of the submission.
        lifespan: when its first token came and when it ended; -1 for what has not happened.
        timestamps: when each token came.
        usage: tokens cached and computed, and why not more was reused; None if it never ran.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    error: str | None = None
    status: HandleStatus = HandleStatus.PENDING
    finish_reason: str | None = None
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: list[float] = field(default_factory=list)
    usage: RowReport | None = None

    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.status.is_final


class TextPieces(TextStreamer):
    """Keeps what transformers' streamer would print."""

    def __init__(self, tokenizer: Any, **decode_kwargs: Any) -> None:
        super().__init__(tokenizer, **decode_kwargs)
        self._pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """As the parent's, without printing."""
        self._pieces.append(text)

    def take(self) -> list[str]:
        """The pieces since the last call that hold any text."""
        pieces, self._pieces = [piece for piece in self._pieces if piece], []
        return pieces

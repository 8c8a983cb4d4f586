"""What a patched model did: counters over its lifetime and one report a row of the last call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .reasons import for_caller
from .requests import Request


@dataclass(frozen=True, slots=True)
class RowReport:
    """One row of a ``generate`` call.

    Attributes:
        prompt_tokens: tokens of the prompt without pads and markers.
        cached_tokens: prompt tokens whose states came from a checkpoint, of an earlier call or of another row.
        computed_tokens: prompt tokens that this row ran through the model.
        boundaries: where the row asked for checkpoints.
        reasons: why a part of the prompt that could have been reused was not, by the position where it ends; the words
            of :class:`Reason`. What other callers have sent is never told.
        notes: what was unusual about the row's markers.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    boundaries: tuple[int, ...]
    reasons: dict[int, str]
    notes: tuple[str, ...]


@dataclass(slots=True)
class CheckpointStats:
    """Counters since patching or the last reset; ``checkpoints``, ``slots_used`` and ``bytes_used`` are current.

    ``prompt_tokens == cached_tokens + computed_tokens`` once every call has returned.
    """

    calls: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    evictions: int = 0
    handed_over: int = 0
    checkpoints: int = 0
    slots_used: int = 0
    bytes_used: int = 0
    last_rows: tuple[RowReport, ...] = field(default=())

    def count(self, rows: Sequence[RowReport], generated_tokens: int) -> None:
        """Add requests that have ended."""
        self.requests += len(rows)
        self.prompt_tokens += sum(row.prompt_tokens for row in rows)
        self.cached_tokens += sum(row.cached_tokens for row in rows)
        self.computed_tokens += sum(row.computed_tokens for row in rows)
        self.generated_tokens += generated_tokens


def report_row(request: Request, notes: tuple[str, ...]) -> RowReport:
    """The report of a request whose prompt has been computed; the end of a turn that nobody declared is not in it."""
    computed = min(request.computed_tokens, request.prompt_tokens - request.cached_tokens)
    return RowReport(
        request.prompt_tokens,
        request.cached_tokens,
        computed,
        tuple(boundary for boundary in request.boundaries if boundary not in request.soft),
        {position: for_caller(reason) for position, reason in request.reasons.items() if position not in request.soft},
        notes,
    )

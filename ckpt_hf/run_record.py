"""A run of an engine as data: one row a request with its phases and waits, one bar a step, slots over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PhaseName = Literal["queued", "deferred", "prefill", "decode", "preempted"]


@dataclass(slots=True)
class Wait:
    """A time in which a request waited for a checkpoint: ``key``, which ``producer`` computed."""

    request: int
    producer: int | None
    key: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start


@dataclass(slots=True)
class Phase:
    """A stretch of a request's life, in seconds of the trace; ``wait`` is set if it waited for another one."""

    name: PhaseName
    start: float
    stop: float
    wait: Wait | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop - self.start


@dataclass(slots=True)
class PieceBar:
    """Tokens ``first`` to ``last`` of a request, computed in one step that took from ``start`` to ``stop``."""

    start: float
    stop: float
    first: int
    last: int


@dataclass(slots=True)
class RequestRow:
    """One request.

    Attributes:
        ended: when its last phase ended.
        resumes_at: position whose computation lets it decode: its prompt's end, or what it had reached when preempted.
        cached: tokens taken from a checkpoint at its last start.
        outcome: reason of its end; None if the trace ends first.
        missed: why a boundary was not started from, by position.
        published: time and number of tokens of each checkpoint that it completed.
    """

    request: int
    submitted: float
    prompt_tokens: int
    ended: float
    resumes_at: int
    phases: list[Phase]
    cached: int = 0
    generated: int | None = None
    outcome: str | None = None
    error: str | None = None
    started_from: str | None = None
    first_token: float | None = None
    waits: list[Wait] = field(default_factory=list)
    pieces: list[PieceBar] = field(default_factory=list)
    missed: dict[int, str] = field(default_factory=dict)
    published: list[tuple[float, int]] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Tokens that ran as prefill in steps that committed."""
        return sum(piece.last - piece.first for piece in self.pieces)

    def seconds_in(self, *names: PhaseName) -> float:
        """Time spent in the given phases."""
        return sum(phase.seconds for phase in self.phases if phase.name in names)


@dataclass(slots=True)
class StepBar:
    """One step: when it ran, and its tokens."""

    step: int
    start: float
    stop: float
    prefill: int = 0
    decode: int = 0
    failed: bool = False


@dataclass(slots=True)
class CheckpointUse:
    """What became of one checkpoint: who computed its ``tokens``, and which requests started from it."""

    key: str
    tokens: int
    producer: int | None = None
    published: float | None = None
    evictions: int = 0
    consumers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """Everything that a picture or a summary needs; ``slots`` holds time, slots used and bytes."""

    rows: dict[int, RequestRow] = field(default_factory=dict)
    steps: list[StepBar] = field(default_factory=list)
    slots: list[tuple[float, int, int]] = field(default_factory=list)
    checkpoints: dict[str, CheckpointUse] = field(default_factory=dict)
    preemptions: int = 0
    end: float = 0.0

    @property
    def waits(self) -> list[Wait]:
        """All waits for checkpoints, longest first."""
        return sorted((w for row in self.rows.values() for w in row.waits), key=lambda w: -w.seconds)

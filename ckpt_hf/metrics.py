"""Counters, gauges and histograms of an engine, kept up to date by its events."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .events import Event
from .histogram import SECONDS, TOKENS, Histogram

COUNTERS = {
    "requests_submitted": "requests taken in",
    "hits": "requests that started from a checkpoint",
    "misses": "requests with a boundary that started from none of theirs",
    "deferred": "waits for a checkpoint that another request computed",
    "preempted": "running requests that had to give up their memory",
    "tokens_computed": "prompt tokens that ran through the model, again after a preemption included",
    "tokens_saved": "prompt tokens whose states came from a checkpoint",
    "tokens_decoded": "rows of decode steps",
    "checkpoints_published": "checkpoints that became ready",
    "checkpoints_dropped": "checkpoints that their request did not complete",
    "evictions": "ready checkpoints that were given up",
    "steps": "forwards of the model that committed",
    "steps_failed": "forwards of the model that failed",
    "request_errors": "errors of single requests",
}
LABELLED = {
    "requests_finished": ("reason", "requests that ended, by how"),
    "boundaries_missed": ("reason", "boundaries that a request could not start from, by why"),
}
GAUGES = {
    "requests_waiting": "requests that hold nothing yet, deferred ones not counted",
    "requests_deferred": "requests that wait for a checkpoint of another one",
    "requests_running": "requests in prefill or decode",
    "checkpoints": "checkpoints that are ready",
    "checkpoints_pinned": "checkpoints that may not be evicted",
    "slots_used": "rows of the state pools in use",
    "bytes_used": "bytes of checkpoints and running requests",
}
HISTOGRAMS = {
    "queue_seconds": (SECONDS, "from submission to the first step, waits for a checkpoint included"),
    "deferred_seconds": (SECONDS, "one wait for a checkpoint of another request"),
    "first_token_seconds": (SECONDS, "from submission to the end of the step that completed the prompt"),
    "request_seconds": (SECONDS, "from submission to the end"),
    "step_seconds": (SECONDS, "one step"),
    "step_tokens": (TOKENS, "tokens of one step"),
}


@dataclass(slots=True)
class _Live:
    """What must be remembered of a request until it ends."""

    submitted: float
    prompt_tokens: int
    boundaries: int
    state: str = "waiting"
    deferred_at: float | None = None
    cached: int | None = None
    answered: bool = False


@dataclass(slots=True)
class _Step:
    """What a step will have done if it commits."""

    begin: float
    prefill: int = 0
    decode: int = 0
    answers: list[_Live] = field(default_factory=list)


class Metrics:
    """A sink of events; thread-safe, and constant in memory but for the requests that have not ended.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.labelled: dict[str, Counter[str]] = {name: Counter() for name in LABELLED}
        self.gauges: dict[str, float] = dict.fromkeys(GAUGES, 0)
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._live: dict[int, _Live] = {}
        self._steps: dict[int, _Step] = {}
        self._handlers: dict[str, Callable[[Event], None]] = {
            "submitted": self._submitted,
            "deferred": self._deferred,
            "missed": lambda event: self._label("boundaries_missed", event.data["reason"]),
            "started": self._started,
            "piece": self._piece,
            "decode": self._decode,
            "published": self._published,
            "dropped": lambda event: self._count("checkpoints_dropped"),
            "evicted": self._evicted,
            "pinned": lambda event: self._shift("checkpoints_pinned", 1),
            "unpinned": lambda event: self._shift("checkpoints_pinned", -1),
            "preempted": self._preempted,
            "finished": self._finished,
            "failed": self._failed,
            "step": self._step,
            "slots": self._slots,
        }

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        handler = self._handlers.get(event.kind)
        if handler is not None:
            with self._lock:
                handler(event)

    def as_dict(self) -> dict[str, Any]:
        """All values now: numbers, dicts by label for ``LABELLED``, ``Histogram.as_dict()`` for ``HISTOGRAMS``."""
        with self._lock:
            values: dict[str, Any] = {**self.counters, **self.gauges}
            values |= {name: dict(counts) for name, counts in self.labelled.items()}
            values |= {name: histogram.as_dict() for name, histogram in self.histograms.items()}
            return values

    def _count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def _label(self, name: str, label: object) -> None:
        self.labelled[name][str(label)] += 1

    def _shift(self, gauge: str, by: int) -> None:
        self.gauges[gauge] += by

    def _move(self, live: _Live, state: str) -> None:
        self._shift(f"requests_{live.state}", -1)
        self._shift(f"requests_{state}", 1)
        if live.deferred_at is not None:
            self.histograms["deferred_seconds"].add(self._clock() - live.deferred_at)
            live.deferred_at = None
        live.state = state

    def _submitted(self, event: Event) -> None:
        assert event.request is not None
        self._count("requests_submitted")
        self._shift("requests_waiting", 1)
        boundaries = len(event.data["boundaries"])
        self._live[event.request] = _Live(self._clock(), event.data["prompt_tokens"], boundaries)

    def _deferred(self, event: Event) -> None:
        self._count("deferred")
        if (live := self._of(event)) is not None:
            self._move(live, "deferred")
            live.deferred_at = self._clock()

    def _started(self, event: Event) -> None:
        if (live := self._of(event)) is None:
            return
        self._move(live, "running")
        if live.cached is None:
            self.histograms["queue_seconds"].add(self._clock() - live.submitted)
            live.cached = event.data["cached"]
        else:
            # A start again saves nothing new, and less than the first one if its checkpoint was lost with a step.
            live.cached = min(event.data["cached"], live.cached)

    def _answer(self, live: _Live) -> None:
        """Count what the request took from the cache, once, when a failed step can no longer change it."""
        if live.answered or live.cached is None:
            return
        live.answered = True
        self._count("tokens_saved", live.cached)
        if live.cached or live.boundaries:
            self._count("hits" if live.cached else "misses")

    def _piece(self, event: Event) -> None:
        step = self._step_of(event)
        step.prefill += event.data["stop"] - event.data["start"]
        live = self._of(event)
        if live is not None and not live.answered and event.data["stop"] >= live.prompt_tokens:
            step.answers.append(live)

    def _decode(self, event: Event) -> None:
        self._step_of(event).decode += event.data["count"]

    def _published(self, event: Event) -> None:
        self._count("checkpoints_published")
        self._shift("checkpoints", 1)

    def _evicted(self, event: Event) -> None:
        self._count("evictions")
        self._shift("checkpoints", -1)

    def _preempted(self, event: Event) -> None:
        self._count("preempted")
        if (live := self._of(event)) is not None:
            self._move(live, "waiting")

    def _finished(self, event: Event) -> None:
        self._label("requests_finished", event.data["reason"])
        live = self._live.pop(event.request, None) if event.request is not None else None
        if live is not None:
            self._answer(live)
            self._move(live, "waiting")
            self._shift("requests_waiting", -1)
            self.histograms["request_seconds"].add(self._clock() - live.submitted)

    def _failed(self, event: Event) -> None:
        if event.request is not None:
            self._count("request_errors")
        elif self._steps.pop(event.step, None) is not None:
            self._count("steps_failed")

    def _step(self, event: Event) -> None:
        if event.data["phase"] == "begin":
            # Planning may have been long before, while another step ran.
            self._step_of(event).begin = self._clock()
            return
        step = self._steps.pop(event.step, None)
        for number in [number for number in self._steps if number < event.step]:
            del self._steps[number]  # of a step that ended without a word
        if step is None:
            return
        if not event.data["tokens"] and step.prefill + step.decode:
            self._count("steps_failed")
            return
        self._count("steps")
        self._count("tokens_computed", step.prefill)
        self._count("tokens_decoded", step.decode)
        self.histograms["step_tokens"].add(step.prefill + step.decode)
        self.histograms["step_seconds"].add(self._clock() - step.begin)
        for live in step.answers:
            if not live.answered:
                self._answer(live)
                self.histograms["first_token_seconds"].add(self._clock() - live.submitted)

    def _slots(self, event: Event) -> None:
        self.gauges["slots_used"], self.gauges["bytes_used"] = event.data["used"], event.data["bytes"]

    def _step_of(self, event: Event) -> _Step:
        step = self._steps.get(event.step)
        if step is None:
            step = self._steps[event.step] = _Step(self._clock())
        return step

    def _of(self, event: Event) -> _Live | None:
        return None if event.request is None else self._live.get(event.request)

"""What the scheduler and the engine tell about themselves: one small record for each thing that happened.

Whoever emits knows nothing of who listens. Times are not part of an event, so that the scheduler needs no clock: a
listener that wants them notes when it was called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

logger = logging.getLogger(__name__)

EventKind: TypeAlias = Literal[
    "submitted",
    "deferred",
    "missed",
    "started",
    "piece",
    "reserved",
    "published",
    "dropped",
    "evicted",
    "pinned",
    "unpinned",
    "decode",
    "preempted",
    "finished",
    "failed",
    "step",
    "slots",
]

FIELDS: Mapping[EventKind, tuple[str, ...]] = {
    "submitted": ("prompt_tokens", "boundaries", "priority"),
    "deferred": ("key", "producer"),
    "missed": ("position", "reason"),
    "started": ("position", "cached"),
    "piece": ("start", "stop", "slot"),
    "reserved": ("key", "tokens"),
    "published": ("key", "tokens"),
    "dropped": ("key", "tokens"),
    "evicted": ("key", "tokens"),
    "pinned": ("key", "tokens"),
    "unpinned": ("key", "tokens"),
    "decode": ("count",),
    "preempted": ("position",),
    "finished": ("reason",),
    "failed": ("error",),
    "step": ("phase", "tokens"),
    "slots": ("used", "bytes"),
}
"""Fields that ``Event.data`` of each kind has at least; more are allowed and are kept in a trace."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    =========== ======= =====================================================================================
    kind        request data
    =========== ======= =====================================================================================
    submitted   whose   ``prompt_tokens``, ``boundaries`` (list), ``priority``; optional ``caller``: digest of the salt
    deferred    waiter  ``key`` waited for, ``producer`` (request id that computes it); once for each new wait
    missed      whose   ``position`` of a boundary not started from, ``reason`` (a value of ``reasons.Reason``)
    started     whose   ``position`` of its first own token, ``cached`` (tokens taken from a checkpoint), optional
                        ``key`` of that checkpoint; again after a preemption or a failed step
    piece       whose   ``start``, ``stop`` (tokens), ``slot`` written; planned in this step, computed if it commits
    reserved    owner   ``key``, ``tokens`` (length of the prefix): it will compute this checkpoint
    published   owner   ``key``, ``tokens``: others may start from it
    dropped     owner   ``key``, ``tokens``: it will not be computed by this request after all
    evicted     None    ``key``, ``tokens``: it was ready and was given up
    pinned      None    ``key``, ``tokens``; likewise ``unpinned``
    decode      None    ``count`` of rows that get one token in this step, optional ``requests`` (list of ids)
    preempted   whose   ``position`` that it had reached; it waits again
    finished    whose   ``reason`` (eos, length, stop, cancelled, failed, shutdown, ...), optional ``generated``: tokens
                        of the answer that were computed on
    failed      whose   ``error`` (text); request None: of a whole step
    step        None    ``phase`` (begin, end), ``tokens``: planned at the begin, committed at the end (0: it failed)
    slots       None    ``used``, ``bytes`` held by checkpoints and running requests; once a step
    =========== ======= =====================================================================================

    Keys are written by :func:`short_key`. A salt is never part of an event.

    Attributes:
        kind: see above.
        step: number of the step in which it happened, counted from 0; between steps that of the next one.
        request: id of the request that it is about, or None.
        data: values that JSON can hold.
    """

    kind: EventKind
    step: int
    request: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


Emit: TypeAlias = Callable[[Event], None]


def short_key(key: bytes) -> str:
    """How a checkpoint's key is written in events: its first 6 bytes, in hex."""
    return key[:6].hex()


class EventSinks:
    """Hands each event to every sink; calling it is an :data:`Emit`.

    A sink must return quickly and may be called from any thread. One that raises is removed, with a logged warning, so
    that watching an engine cannot break it.
    """

    def __init__(self, *sinks: Emit) -> None:
        self._sinks = tuple(sinks)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def __call__(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                self.remove(sink)
                logger.warning("event sink %r raised and gets no more events", sink, exc_info=True)

    def add(self, sink: Emit) -> None:
        """Send events to ``sink`` as well."""
        self._sinks = (*self._sinks, sink)

    def remove(self, sink: Emit) -> None:
        """Stop sending events to ``sink``; one that is not there is ignored."""
        self._sinks = tuple(s for s in self._sinks if s != sink)

"""Events as an engine would emit them, written down by hand: sequences whose right reading is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_hf.events import Event, EventKind
from ckpt_hf.trace_events import TimedEvent


class Script:
    """Emits events to ``sink`` at times that the test sets."""

    def __init__(self, sink: Callable[[Event], None] | None = None) -> None:
        self.now = 0.0
        self.step = 0
        self.events: list[TimedEvent] = []
        self._sink = sink

    def clock(self) -> float:
        """The time that the test has set."""
        return self.now

    def emit(self, kind: EventKind, request: int | None = None, **data: Any) -> None:
        """One event now."""
        event = Event(kind, self.step, request, data)
        self.events.append(TimedEvent(self.now, event))
        if self._sink is not None:
            self._sink(event)

    def submit(self, request: int, prompt_tokens: int, *boundaries: int) -> None:
        """A request comes in."""
        self.emit("submitted", request, prompt_tokens=prompt_tokens, boundaries=list(boundaries), priority=0)

    def run(
        self, seconds: float, *pieces: tuple[int, int, int], decode: tuple[int, ...] = (), fails: bool = False
    ) -> None:
        """One step of ``pieces`` (request, start, stop) and one token for each of ``decode``."""
        tokens = sum(stop - start for _, start, stop in pieces) + len(decode)
        for slot, (request, start, stop) in enumerate(pieces):
            self.emit("piece", request, start=start, stop=stop, slot=slot)
        if decode:
            self.emit("decode", count=len(decode), requests=list(decode))
        self.emit("step", phase="begin", tokens=tokens)
        self.now += seconds
        if fails:
            self.emit("failed", error="out of memory")
        else:
            self.emit("step", phase="end", tokens=tokens, seconds=seconds)
        self.step += 1


def producer_and_consumer(script: Script) -> None:
    """Request 0 computes 512 tokens in two steps of 1 s each; request 1 waits for them; both decode 2 tokens.

    Times: 0 submitted both; steps 0-1, 1-2 (0 produces), 2-3 (both suffixes), 3-4 and 4-5 (decode).
    """
    key = "abcdefabcdef"
    script.submit(0, 544, 512)
    script.submit(1, 576, 512)
    script.emit("missed", 0, position=512, reason="never seen")
    script.emit("started", 0, position=0, cached=0)
    script.emit("reserved", 0, key=key, tokens=512)
    script.emit("deferred", 1, key=key, producer=0)
    script.run(1.0, (0, 0, 256))
    script.run(1.0, (0, 256, 512))
    script.emit("published", 0, key=key, tokens=512)
    script.emit("slots", used=2, bytes=2000)
    script.emit("started", 1, position=512, cached=512, key=key)
    script.run(1.0, (0, 512, 544), (1, 512, 576))
    script.run(1.0, decode=(0, 1))
    script.run(1.0, decode=(0, 1))
    script.emit("finished", 0, reason="length", generated=2)
    script.emit("finished", 1, reason="eos", generated=2)
    script.emit("slots", used=1, bytes=1000)

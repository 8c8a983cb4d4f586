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
        self.emit("step", phase="end", tokens=0 if fails else tokens)
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


class ManyAnchors:
    """A small engine of its own kind, to have long runs to look at.

    ``anchors`` prefixes of 700 tokens or more with ``consumers`` requests each come in, some with every step. At most
    ``limit`` run at once; requests whose prefix is being computed wait for it; each decodes 8 to 23 tokens.
    """

    def __init__(self, script: Script, anchors: int, consumers: int, budget: int = 512, limit: int = 64) -> None:
        self.script, self.budget, self.limit = script, budget, limit
        self.consumers = consumers
        self.arriving = list(range(anchors * consumers))
        self.waiting: list[int] = []
        self.deferred: set[int] = set()
        self.positions: dict[int, int] = {}
        self.decoding: dict[int, int] = {}
        self.producers: dict[int, int] = {}
        self.ready: set[int] = set()

    def run(self) -> None:
        """All requests to their end."""
        while self.arriving or self.waiting or self.positions or self.decoding:
            for request in self.arriving[:6]:
                self.script.submit(request, self._length(request), self._prefix(request))
                self.waiting.append(request)
            del self.arriving[:6]
            self._admit()
            self._step()

    def _anchor(self, request: int) -> int:
        return request // self.consumers

    def _key(self, request: int) -> str:
        return f"{self._anchor(request) * 0x9E3779B97F4A % 2**48:012x}"

    def _prefix(self, request: int) -> int:
        return 700 + 300 * (self._anchor(request) % 5)

    def _length(self, request: int) -> int:
        return self._prefix(request) + 24 + 7 * (request % 9)

    def _admit(self) -> None:
        for request in list(self.waiting):
            anchor, prefix = self._anchor(request), self._prefix(request)
            if anchor in self.producers and anchor not in self.ready:
                if request not in self.deferred:
                    self.script.emit("deferred", request, key=self._key(request), producer=self.producers[anchor])
                    self.deferred.add(request)
                continue
            if len(self.positions) + len(self.decoding) >= self.limit:
                continue
            self.waiting.remove(request)
            start = prefix if anchor in self.ready else 0
            self.script.emit(
                "started", request, position=start, cached=start, key=self._key(request) if start else None
            )
            self.positions[request] = start
            if not start:
                self.script.emit("missed", request, position=prefix, reason="never seen")
                self.script.emit("reserved", request, key=self._key(request), tokens=prefix)
                self.producers[anchor] = request

    def _step(self) -> None:
        room, pieces = self.budget - len(self.decoding), []
        for request, start in self.positions.items():
            cut = self._prefix(request) if start < self._prefix(request) else self._length(request)
            stop = min(cut, start + room)
            if stop > start:
                pieces.append((request, start, stop))
                room -= stop - start
        decoding = tuple(self.decoding)
        self.script.run(0.004 + 2e-5 * sum(b - a for _, a, b in pieces), *pieces, decode=decoding)
        for request, _, stop in pieces:
            self.positions[request] = stop
            if stop == self._prefix(request):
                self.script.emit("published", request, key=self._key(request), tokens=stop)
                self.ready.add(self._anchor(request))
            elif stop == self._length(request):
                del self.positions[request]
                self.decoding[request] = 8 + request % 16
        for request in decoding:
            self.decoding[request] -= 1
            if not self.decoding[request]:
                del self.decoding[request]
                self.script.emit("finished", request, reason="eos", generated=8 + request % 16)
        used = len(self.ready) + len(self.positions) + len(self.decoding)
        self.script.emit("slots", used=used, bytes=used * 50_000_000)

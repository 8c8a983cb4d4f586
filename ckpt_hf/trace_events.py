"""Events as JSON lines in a file: a writer that the engine never waits for, and the reader."""

from __future__ import annotations

import atexit
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from .errors import CheckpointValueError
from .events import FIELDS, Event

logger = logging.getLogger(__name__)

FORMAT = "ckpt_hf.trace"
VERSION = 1
_FIELDS = {str(kind): fields for kind, fields in FIELDS.items()}
_BATCH = 64
"""Lines between two writes. A write lets go of Python's lock, so the engine's thread waits for no more than these."""


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event and when it happened, in seconds since the trace began."""

    time: float
    event: Event


class TraceWriter:
    """A sink that writes events to ``path``, one JSON object a line, from a thread of its own.

    Calling it costs a clock reading and an append to a queue. When the disk is slower than the engine for so long that
    ``buffered_events`` wait, further events are counted instead of kept; the file says how many. An error of the disk
    is logged once and ends the trace, never the engine.

    Args:
        path: file to write; one that exists is replaced.
        buffered_events: events that may wait for the disk.
        on_close: called once when it is closed, to stop its events.

    Raises:
        CheckpointValueError: ``path`` cannot be opened, or ``buffered_events`` is below 1.
    """

    def __init__(
        self, path: str | Path, buffered_events: int = 65536, on_close: Callable[[TraceWriter], None] | None = None
    ) -> None:
        if buffered_events < 1:
            raise CheckpointValueError(f"buffered_events must be at least 1, got {buffered_events}")
        self.path = Path(path)
        try:
            self._file: TextIO = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise CheckpointValueError(f"path {str(path)!r} cannot be written: {error}") from error
        self._capacity = buffered_events
        self._on_close = on_close
        self._queue: SimpleQueue[tuple[float, Event] | None] = SimpleQueue()
        self._lost = 0
        self._closed = False
        self._begin = time.perf_counter()
        self._thread = threading.Thread(target=self._drain, name="ckpt_hf-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        """Take one event; never blocks and never raises."""
        if self._closed or self._queue.qsize() >= self._capacity:
            self._lost += 1
        else:
            self._queue.put((time.perf_counter(), event))

    @property
    def lost(self) -> int:
        """Events that were not written."""
        return self._lost

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits and close the file; gives up after ``timeout`` seconds. May be called again."""
        if self._on_close is not None:
            self._on_close(self)
            self._on_close = None
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drain(self) -> None:
        try:
            with self._file as file:
                file.write(json.dumps({"format": FORMAT, "version": VERSION, "unix_time": time.time()}) + "\n")
                open_ended = True
                while open_ended:
                    batch, open_ended = self._next_batch()
                    file.writelines(self._line(at, event) for at, event in batch)
                    file.flush()
                self._lost += self._queue.qsize()  # taken while the file was being closed
                if self._lost:
                    file.write(json.dumps({"lost": self._lost}) + "\n")
        except (OSError, ValueError):
            self._closed = True
            logger.warning("the trace %s ends here: it could not be written", self.path, exc_info=True)

    def _next_batch(self) -> tuple[list[tuple[float, Event]], bool]:
        """What waits now, at least one, and whether more may come."""
        batch = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == _BATCH:
                return batch, True
            try:
                item = self._queue.get_nowait()
            except Empty:
                return batch, True
        return batch, False

    def _line(self, at: float, event: Event) -> str:
        record = {
            "t": round(at - self._begin, 7),
            "kind": event.kind,
            "step": event.step,
            "request": event.request,
            "data": dict(event.data),
        }
        return json.dumps(record, default=str) + "\n"


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace file holds.

    Attributes:
        events: in order of time.
        unix_time: when the trace began, in seconds since 1970.
        lost: events that the writer could not keep.
        unreadable: lines that hold no event, for example the last one of a process that was killed.
    """

    events: tuple[TimedEvent, ...]
    unix_time: float
    lost: int = 0
    unreadable: int = 0


def read_trace(path: str | Path) -> Trace:
    """Read a file of :class:`TraceWriter`, also one that is still being written.

    Raises:
        CheckpointValueError: ``path`` cannot be read, or is no trace or one of a newer version.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise CheckpointValueError(f"path {str(path)!r} cannot be read: {error}") from error
    records = [_parse(line) for line in lines if line.strip()]
    head = (records[0] if records else None) or {}
    if head.get("format") != FORMAT:
        raise CheckpointValueError(f"path {str(path)!r} holds no trace: its first line must name the format {FORMAT!r}")
    if head.get("version") != VERSION:
        raise CheckpointValueError(
            f"path {str(path)!r} is a trace of version {head.get('version')}; version {VERSION} can be read"
        )
    body = records[1:]
    lost = sum(record["lost"] for record in body if record and isinstance(record.get("lost"), int))
    events = tuple(sorted(_timed(body), key=lambda timed: timed.time))
    strange = sum(1 for record in body if record is None or ("lost" not in record and not _is_event(record)))
    return Trace(events, float(head.get("unix_time", 0.0)), lost, strange)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_event(record: Mapping[str, Any]) -> bool:
    data = record.get("data")
    return (
        isinstance(record.get("t"), (int, float))
        and math.isfinite(record["t"])
        and isinstance(record.get("kind"), str)
        and record["kind"] in _FIELDS
        and isinstance(record.get("step"), int)
        and isinstance(record.get("request"), (int, type(None)))
        and isinstance(data, dict)
        and all(name in data for name in _FIELDS[record["kind"]])
    )


def _timed(records: list[dict[str, Any] | None]) -> Iterator[TimedEvent]:
    for record in records:
        if record is not None and _is_event(record):
            event = Event(record["kind"], record["step"], record["request"], record["data"])
            yield TimedEvent(float(record["t"]), event)

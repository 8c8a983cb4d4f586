"""The trace file: what is written is read, and nothing that happens to the file reaches the engine."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_hf.errors import CheckpointValueError
from ckpt_hf.events import Event
from ckpt_hf.trace_events import TraceWriter, read_trace

from .event_script import Script, producer_and_consumer


def evicted(tokens: int) -> Event:
    return Event("evicted", 0, None, {"key": "ab", "tokens": tokens})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path) as writer:
        script = Script(writer)
        producer_and_consumer(script)
    trace = read_trace(path)
    assert [timed.event for timed in trace.events] == [timed.event for timed in script.events]
    times = [timed.time for timed in trace.events]
    assert times == sorted(times) and times[0] >= 0
    assert (trace.lost, trace.unreadable) == (0, 0)
    assert all(set(json.loads(line)) for line in path.read_text().splitlines())


def test_a_full_buffer_loses_events_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    line = TraceWriter._line

    def slow(self: TraceWriter, at: float, event: Event) -> str:
        disk.wait(30)
        return line(self, at, event)

    monkeypatch.setattr(TraceWriter, "_line", slow)
    writer = TraceWriter(tmp_path / "run.jsonl", buffered_events=10)
    for tokens in range(500):
        writer(evicted(tokens))  # returns although nothing can be written
    assert writer.lost >= 500 - 10 - 64
    disk.set()
    writer.close()
    trace = read_trace(writer.path)
    assert trace.lost == writer.lost
    assert len(trace.events) + trace.lost == 500
    assert trace.events[0].event.data["tokens"] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        writer = TraceWriter("/dev/full")
        writer(evicted(1))
        writer.close()
        writer(evicted(2))
        writer.close()
    assert len([record for record in caplog.records if "could not be written" in record.message]) == 1


def test_values_that_json_does_not_know_are_written_as_text(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        writer(Event("failed", 0, 1, {"error": ValueError("no")}))
    assert read_trace(writer.path).events[0].event.data["error"] == "no"


def test_threads_lose_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        threads = [
            threading.Thread(target=lambda i=i: [writer(evicted(1000 * i + n)) for n in range(200)]) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    tokens = [timed.event.data["tokens"] for timed in read_trace(writer.path).events]
    assert sorted(tokens) == sorted(1000 * i + n for i in range(8) for n in range(200))


def test_a_process_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = (
        "import sys; from ckpt_hf.trace_events import TraceWriter; from ckpt_hf.events import Event\n"
        "writer = TraceWriter(sys.argv[1])\n"
        "for i in range(300): writer(Event('evicted', 0, None, {'key': 'k', 'tokens': i}))\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=root, check=True, timeout=120)
    assert len(read_trace(path).events) == 300


@pytest.mark.parametrize(
    ("line", "unreadable"),
    [
        ('{"t": 1.0, "kind": "evicted", "step": 0, "requ', 1),
        ("[]", 1),
        ('{"t": 1.0, "kind": "unheard of", "step": 0, "request": null, "data": {}}', 1),
        ('{"t": 1.0, "kind": "evicted", "step": 0, "request": null, "data": {"key": "k"}}', 1),
        ('{"t": "x", "kind": "evicted", "step": 0, "request": null, "data": {"key": "k", "tokens": 1}}', 1),
        ("\ufffd\ufffd", 1),
        ("", 0),
    ],
)
def test_a_broken_line_is_counted_and_skipped(tmp_path: Path, line: str, unreadable: int) -> None:
    with TraceWriter(tmp_path / "run.jsonl") as writer:
        writer(evicted(1))
    with writer.path.open("a") as file:
        file.write(line + "\n")
    trace = read_trace(writer.path)
    assert (len(trace.events), trace.unreadable) == (1, unreadable)


@pytest.mark.parametrize("content", ["", "hello\n", '{"t": 1}\n', '{"format": "ckpt_hf.trace", "version": 99}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(CheckpointValueError, match="path"):
        read_trace(path)


@pytest.mark.parametrize(
    "arguments",
    [{"path": "/no/such/folder/run.jsonl"}, {"path": "/dev/null", "buffered_events": 0}],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(CheckpointValueError, match=list(arguments)[-1]):
        TraceWriter(**arguments)


def test_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match="cannot be read"):
        read_trace(tmp_path / "nothing")

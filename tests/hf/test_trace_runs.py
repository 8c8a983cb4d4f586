"""From events to rows, waits and steps; from those to words, tables and a picture."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ckpt_hf import trace
from ckpt_hf.errors import CheckpointRuntimeError
from ckpt_hf.events import FIELDS, Event
from ckpt_hf.run_record import Run
from ckpt_hf.trace_events import TimedEvent, TraceWriter
from ckpt_hf.trace_headline import amount, headline, quantile, seconds, why_waited
from ckpt_hf.trace_picture import draw
from ckpt_hf.trace_rows import MAX_ROWS
from ckpt_hf.trace_runs import read_run
from ckpt_hf.trace_text import print_summary

from .event_script import ManyAnchors, Script, producer_and_consumer


def run_of(script: Script) -> Run:
    return read_run(script.events)


def two() -> Run:
    script = Script()
    producer_and_consumer(script)
    return run_of(script)


def phases(run: Run, request: int) -> list[tuple[str, float, float]]:
    return [(p.name, p.start, p.stop) for p in run.rows[request].phases if p.seconds]


def text_of(run: Run, **gaps: int) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    print_summary(run, console, **gaps)
    return console.export_text()


class TestRows:
    def test_a_producer_and_its_consumer(self) -> None:
        run = two()
        assert phases(run, 0) == [("prefill", 0, 3), ("decode", 3, 5)]
        assert phases(run, 1) == [("deferred", 0, 2), ("prefill", 2, 3), ("decode", 3, 5)]
        (wait,) = run.waits
        assert (wait.request, wait.producer, wait.seconds) == (1, 0, 2.0)
        row = run.rows[1]
        assert (row.cached, row.computed, row.generated, row.outcome, row.first_token) == (512, 64, 2, "eos", 3.0)
        assert run.rows[0].published == [(2.0, 512)]
        assert run.rows[0].missed == {512: "never seen"}
        use = run.checkpoints["abcdefabcdef"]
        assert (use.producer, use.tokens, use.published, use.consumers) == (0, 512, 2.0, [1])
        assert [(s.prefill, s.decode) for s in run.steps] == [(256, 0), (256, 0), (96, 0), (0, 2), (0, 2)]

    def test_who_is_ready_but_not_admitted_is_queued(self) -> None:
        script = Script()
        script.submit(0, 100, 60)
        script.submit(1, 100, 60)
        script.emit("started", 0, position=0, cached=0)
        script.emit("deferred", 1, key="k", producer=0)
        script.run(1.0, (0, 0, 60))
        script.emit("published", 0, key="k", tokens=60)
        script.run(2.0, (0, 60, 100))
        script.emit("started", 1, position=60, cached=60, key="k")
        script.run(1.0, (1, 60, 100))
        run = run_of(script)
        assert phases(run, 1) == [("deferred", 0, 1), ("queued", 1, 3), ("prefill", 3, 4)]
        assert [w.seconds for w in run.waits] == [1.0]

    def test_a_waiter_that_takes_over(self) -> None:
        script = Script()
        for request in range(3):
            script.submit(request, 100, 60)
        script.emit("started", 0, position=0, cached=0)
        script.emit("deferred", 1, key="k", producer=0)
        script.emit("deferred", 2, key="k", producer=0)
        script.run(1.0, (0, 0, 32))
        script.emit("finished", 0, reason="cancelled")
        script.emit("dropped", 0, key="k", tokens=60)
        script.emit("started", 1, position=0, cached=0)
        script.emit("deferred", 2, key="k", producer=1)
        script.run(1.0, (1, 0, 60))
        run = run_of(script)
        assert run.rows[0].outcome == "cancelled"
        assert phases(run, 1) == [("deferred", 0, 1), ("prefill", 1, 2)]
        assert [(w.producer, w.seconds) for w in run.rows[2].waits] == [(0, 1.0), (1, 1.0)]

    def test_a_failed_step_computes_nothing(self) -> None:
        script = Script()
        script.submit(0, 100)
        script.emit("started", 0, position=0, cached=0)
        script.run(1.0, (0, 0, 100), fails=True)
        script.emit("started", 0, position=0, cached=0)
        script.run(1.0, (0, 0, 100))
        run = run_of(script)
        assert [s.failed for s in run.steps] == [True, False]
        assert (run.rows[0].computed, run.rows[0].first_token) == (100, 2.0)

    def test_a_preempted_request_decodes_again_where_it_was(self) -> None:
        script = Script()
        script.submit(0, 100)
        script.emit("started", 0, position=0, cached=0)
        script.run(1.0, (0, 0, 100))
        script.run(1.0, decode=(0,))
        script.emit("preempted", 0, position=101)
        script.run(1.0)
        script.emit("started", 0, position=0, cached=0)
        script.run(1.0, (0, 0, 100))
        script.run(1.0, (0, 100, 101))
        script.run(1.0, decode=(0,))
        script.emit("finished", 0, reason="length")
        run = run_of(script)
        expected = [("prefill", 0, 1), ("decode", 1, 2), ("preempted", 2, 3), ("prefill", 3, 5), ("decode", 5, 6)]
        assert phases(run, 0) == expected
        assert (run.preemptions, run.rows[0].first_token) == (1, 1.0)

    def test_steps_that_are_planned_while_another_runs(self) -> None:
        script = Script()
        script.submit(0, 8)
        script.submit(1, 8)
        script.emit("piece", 0, start=0, stop=8, slot=0)
        script.emit("step", phase="begin", tokens=8)
        script.step = 1
        script.now = 1.0
        script.emit("piece", 1, start=0, stop=8, slot=1)
        script.now = 2.0
        script.step = 0
        script.emit("step", phase="end", tokens=8)
        script.step = 1
        script.emit("step", phase="begin", tokens=8)
        script.now = 3.0
        script.emit("step", phase="end", tokens=8)
        run = run_of(script)
        assert [(s.start, s.stop) for s in run.steps] == [(0.0, 2.0), (2.0, 3.0)]
        assert [(p.start, p.stop) for p in run.rows[1].pieces] == [(2.0, 3.0)]

    def test_a_long_run_adds_up(self) -> None:
        script = Script()
        ManyAnchors(script, 9, 7).run()
        run = run_of(script)
        assert len(run.rows) == 63
        for row in run.rows.values():
            assert row.cached + row.computed == row.prompt_tokens
            spans = [(p.start, p.stop) for p in row.phases]
            assert spans[0][0] == row.submitted and spans[-1][1] == row.ended
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))


_VALUES = st.integers(0, 3)
_EVENTS = st.builds(
    lambda at, kind, step, request, value, end: TimedEvent(
        at,
        Event(
            kind,
            step,
            request,
            dict.fromkeys(FIELDS[kind], value)
            | ({"phase": "end" if end else "begin"} if kind == "step" else {})
            | ({"boundaries": [value]} if kind == "submitted" else {}),
        ),
    ),
    st.floats(0, 10),
    st.sampled_from(list(FIELDS)),
    _VALUES,
    st.one_of(st.none(), _VALUES),
    _VALUES,
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(_EVENTS.filter(lambda t: t.event.kind != "submitted" or t.event.request is not None), max_size=40))
def test_any_mix_of_events_is_read_and_told(events: list[TimedEvent]) -> None:
    """A trace may lack its begin, lose events or end anywhere."""
    run = read_run(sorted(events, key=lambda timed: timed.time))
    assert all(phase.seconds >= 0 for row in run.rows.values() for phase in row.phases)
    assert f"{len(run.rows)} requests" in headline(run)
    assert text_of(run)


class TestWords:
    def test_the_headline_names_who_waited_for_whom(self) -> None:
        assert headline(two()) == (
            "2 requests in 5 s: 512 of 1,120 prompt tokens (46%) came from checkpoints. "
            "1 waited for a checkpoint, the longest 2 s: #1 for #0."
        )

    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [(100, "room in a step: 3 of 3 steps were full"), (10, "a slot or memory: 2 of 3 steps were not full")],
    )
    def test_why_a_request_was_queued(self, tokens: int, expected: str) -> None:
        script = Script()
        script.submit(0, 500)
        script.submit(1, 8)
        script.emit("started", 0, position=0, cached=0)
        script.run(1.0, (0, 0, 100))
        script.run(1.0, (0, 100, 100 + tokens))
        script.run(1.0, (0, 200, 200 + tokens))
        script.emit("started", 1, position=0, cached=0)
        script.run(1.0, (1, 0, 8))
        run = run_of(script)
        assert why_waited(run, run.rows[1]) == [(3.0, expected)]
        assert f"#1 was queued longest, 3 s, for {expected}." in headline(run)

    def test_the_tables_hold_the_figures(self) -> None:
        text = text_of(two())
        for part in ("1 length, 1 eos", "608 prefill, 4 decode", "checkpoint abcdef of request #0", "never seen"):
            assert part in text
        assert "lost" not in text
        assert "5 events were lost and 2 lines unreadable" in text_of(two(), lost=5, unreadable=2)

    @pytest.mark.parametrize(
        ("value", "text"), [(0.0, "0 µs"), (5e-5, "50 µs"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (75.0, "75 s")]
    )
    def test_durations(self, value: float, text: str) -> None:
        assert seconds(value) == text

    @pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (2**41, "2,048 GiB")])
    def test_amounts(self, value: int, text: str) -> None:
        assert amount(value) == text

    @given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.sampled_from([0.0, 0.25, 0.5, 0.95, 1.0]))
    def test_quantiles(self, values: list[int], share: float) -> None:
        found = quantile(values, share)
        assert found in values
        assert sum(v <= found for v in values) >= share * len(values)
        assert sum(v < found for v in values) < max(share * len(values), 1)


def pixels(path: Path) -> Any:
    from matplotlib.image import imread

    return imread(path)


class TestPicture:
    @pytest.fixture(autouse=True)
    def _matplotlib(self) -> None:
        pytest.importorskip("matplotlib")

    @pytest.mark.parametrize("requests", [(1, 1), (4, 6), (16, 10)])
    def test_every_request_has_a_row_and_every_wait_an_arrow(
        self, requests: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from matplotlib.axes import Axes

        heads: list[float] = []
        diamonds: list[float] = []
        ticks: list[range] = []
        plot, set_yticks = Axes.plot, Axes.set_yticks

        def note_plot(self: Any, *args: Any, **kwargs: Any) -> Any:
            heads.extend(args[0] if kwargs.get("marker") == ">" else [])
            diamonds.extend([args[0]] if kwargs.get("marker") == "D" else [])
            return plot(self, *args, **kwargs)

        def note_ticks(self: Any, at: range, *args: Any, **kwargs: Any) -> Any:
            ticks.append(at)
            return set_yticks(self, at, *args, **kwargs)

        monkeypatch.setattr(Axes, "plot", note_plot)
        monkeypatch.setattr(Axes, "set_yticks", note_ticks)
        script = Script()
        ManyAnchors(script, *requests).run()
        run = run_of(script)
        draw(run, tmp_path / "run.png")
        assert len(heads) == len([w for w in run.waits if w.seconds > 0])
        assert len(diamonds) == requests[0]
        assert ticks[0][-1] >= len(run.rows) - ticks[0].step

    def test_colours_of_a_wait_and_of_its_end_are_in_the_picture(self, tmp_path: Path) -> None:
        draw(two(), tmp_path / "run.png")
        image = (pixels(tmp_path / "run.png")[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()
        seen = {tuple(pixel) for pixel in image}
        assert {(0xF0, 0xB0, 0x4A), (0x1F, 0x5F, 0x99), (0x7F, 0xC8, 0xA9)} <= seen

    def test_a_large_run_is_summarised(self, tmp_path: Path) -> None:
        script = Script()
        ManyAnchors(script, 40, 10).run()
        run = run_of(script)
        assert len(run.rows) > MAX_ROWS
        draw(run, tmp_path / "run.png")
        height, width = pixels(tmp_path / "run.png").shape[:2]
        assert height < 2.5 * width

    @pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
    def test_formats(self, ending: str, tmp_path: Path) -> None:
        draw(two(), tmp_path / f"run.{ending}")
        assert (tmp_path / f"run.{ending}").stat().st_size > 5000

    @pytest.mark.parametrize("events", [[], [TimedEvent(0.0, Event("slots", 0, None, {"used": 0, "bytes": 0}))]])
    def test_an_empty_run_is_drawn(self, events: list[TimedEvent], tmp_path: Path) -> None:
        draw(read_run(events), tmp_path / "run.png")
        assert (tmp_path / "run.png").exists()

    @pytest.mark.parametrize("name", ["run.nothing", "no/such/folder/run.png"])
    def test_a_picture_that_cannot_be_written(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointRuntimeError, match="output"):
            draw(two(), tmp_path / name)


class TestCommand:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        with TraceWriter(tmp_path / "run.jsonl") as writer:
            producer_and_consumer(Script(writer))
        return writer.path

    def test_prints_and_draws(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        assert trace.main([str(file)]) == 0
        assert "came from checkpoints" in capsys.readouterr().out
        assert file.with_suffix(".png").exists()
        assert trace.main([str(file), "--output", str(file.with_name("other.svg"))]) == 0
        assert file.with_name("other.svg").exists()

    def test_without_matplotlib_the_summary_remains(
        self, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert trace.main([str(file)]) == 1
        said = capsys.readouterr()
        assert "came from checkpoints" in said.out and "gdn-checkpoint[trace]" in said.err
        assert trace.main([str(file), "--no-picture"]) == 0

    def test_a_file_that_is_no_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("hello")
        assert trace.main([str(path)]) == 1
        assert "holds no trace" in capsys.readouterr().err

    def test_records_that_no_run_wrote(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Whatever one field of one record holds, the command says in a line what is wrong, or counts the record."""
        lines = file.read_text().splitlines()
        for at in range(1, len(lines)):
            record = json.loads(lines[at])
            for name, value in itertools.product(("t", "kind", "step", "request", "data"), ("x", [1], {}, None, 1e400)):
                broken = json.dumps({**record, name: value})
                file.write_text("\n".join([*lines[:at], broken, *lines[at + 1 :]]))
                assert trace.main([str(file), "--no-picture"]) in (0, 1)
            for name in record["data"]:
                broken = json.dumps({**record, "data": {**record["data"], name: [{}]}})
                file.write_text("\n".join([*lines[:at], broken, *lines[at + 1 :]]))
                assert trace.main([str(file), "--no-picture"]) in (0, 1)
        capsys.readouterr()

    def test_a_byte_order_mark_and_bottomless_brackets(self, file: Path) -> None:
        text = file.read_text()
        file.write_text("\ufeff" + text + "\n" + "[" * 100_000 + "\n", encoding="utf-8")
        assert trace.main([str(file), "--no-picture"]) == 0

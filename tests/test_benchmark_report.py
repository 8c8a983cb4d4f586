"""The report: the loads it runs, its summaries, its exit code. Nothing here depends on how long a call took."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.arms import ARMS, TwoPhase
from benchmarks.compare import compare, format_comparisons
from benchmarks.figure import FLOOR, IN_FULL, LEGACY, OURS, collect, spread
from benchmarks.figure import main as draw_figure
from benchmarks.floors import bytes_moved
from benchmarks.loads import SHARD, WHOLE_LAYER, Load, Shape, on_cpu
from benchmarks.measure import GRAPH_OF_MANY, Timer, Timing
from benchmarks.peers import PEERS
from benchmarks.report import main, parse_arguments, plan
from benchmarks.run_picture import main as draw_run
from benchmarks.tables import Row, format_table, make_rows

SHAPES = [on_cpu(WHOLE_LAYER), on_cpu(SHARD)]


def test_the_published_loads_and_shapes() -> None:
    (whole, loads), (quarter, quarter_loads), (shard, shard_loads) = plan(torch.device("cuda"), long=False)
    assert (whole.heads_k, whole.heads_v, whole.dim, whole.dtype) == (16, 32, 128, torch.bfloat16)
    assert (quarter.heads_k, quarter.heads_v, quarter.conv_width) == (4, 8, 0)
    assert (shard.heads_k, shard.heads_v, shard.conv_width) == (4, 8, 4)
    assert [(load.producers, load.consumers) for load in loads] == [((512,), (64,) * n) for n in (1, 2, 4, 8, 16)]
    assert shard_loads == quarter_loads == loads
    options = parse_arguments([])
    assert [shape.name for shape in (whole, quarter, shard)] == ["16/32", "4/8", "4/8+conv"]
    assert (options.warmups, options.repetitions, options.seed) == (5, 20, 1)


def test_summary_and_ratio() -> None:
    timing = Timing.of([1e-6 * n for n in range(1, 12)])
    assert (timing.median, timing.p10, timing.p90) == pytest.approx((6.0, 2.0, 10.0))
    single = Timing.of([2e-6])
    rows = make_rows("load", {("slow", "eager"): (timing, 0.0), ("fast", "eager"): (single, 1e-3)}, "slow")
    assert [row.ratio for row in rows] == pytest.approx([1.0, 3.0])
    assert make_rows("load", {("fast", "graph"): (single, 0.0)}, "slow")[0].ratio is None
    lines = format_table("title", rows, {"slow": "the slow one", "fast": "the fast one"}).splitlines()
    assert lines[0] == "title"
    assert "the fast one" in lines[4]
    assert "3.00" in lines[4]


def _row(arm: str, median: float, load: str = "1 x 512 + 16 x 64", mode: str = GRAPH_OF_MANY) -> Row:
    return Row(load, arm, mode, Timing(median, median, median), None, 1e-3)


def test_comparisons_take_the_best_of_each_project() -> None:
    rows = [_row("two_phase", 50), _row("fla_two_calls", 250), _row("fla_one_by_one", 700), _row("in_full", 400)]
    rows += [_row("flashinfer_two_calls", 100), _row("flashinfer_split", 80), _row("flashinfer_in_full", 300)]
    rows += [_row("flashinfer_split", 10, mode="eager"), _row("flashinfer_split", 10, load="another")]
    arms = [arm for arms in (ARMS, *PEERS.values()) for arm in arms]
    [comparison] = compare(rows, arms, {"1 x 512 + 16 x 64": 20.0})
    assert {project: (best.arm, best.ratio) for project, best in comparison.peers.items()} == {
        "FLA": ("fla_two_calls", 5.0),
        "FlashInfer": ("flashinfer_split", 1.6),
    }
    assert comparison.in_full is not None
    assert (comparison.in_full.arm, comparison.in_full.ratio) == ("flashinfer_in_full", 6.0)
    printed = format_comparisons("title", [comparison], {arm.name: arm.title for arm in arms})
    assert "250.0 x5.00 1.0e-03" in printed
    assert " 40%" in printed


def test_bytes_of_the_floor() -> None:
    tokens = 2 * (2 * 16 + 2 * 32) * 128 + 4 * 2 * 32
    states = 32 * 128 * 128 * 4
    assert bytes_moved(WHOLE_LAYER, Load.of(1, 512, 16, 64)) == 1536 * tokens + 18 * states
    layer = 2 * (2 * 4 + 2 * 8) * 128 + 2 * 2 * 8
    assert bytes_moved(SHARD, Load.of(2, 5, 3, 7)) == 31 * layer + 7 * (8 * 128 * 128 * 4 + 3 * 2 * 16 * 128)


def _figures(rows: list[Row], installed: dict[str, str]) -> dict[str, Any]:
    loads = {f"1 x 512 + {n} x 64": n for n in (1, 16)} | {"1 x 8192 + 64 x 128": 64}
    environment = {"device": "a GPU", "flash-linear-attention": "0.6.0", "flashinfer-python": "not installed"}
    table = {"heads": [16, 32], "conv_width": 0, "consumers": loads, "floors": dict.fromkeys(loads, 5.0)}
    table["title"] = "delta rule alone: H_k 16, H_v 32, D 128, bfloat16, fp32 states"
    table["rows"] = [asdict(row) for row in rows]
    return {"environment": {**environment, "flash-qla": "not installed", **installed}, "tables": [table]}


def test_figure_joins_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    one, many, long = ("1 x 512 + 1 x 64", "1 x 512 + 16 x 64", "1 x 8192 + 64 x 128")
    first = [_row("two_phase", 20, one), _row("two_phase", 50, many), _row("two_phase", 900, long)]
    first += [_row("legacy", 600, one), _row("in_full", 60, one), _row("in_full", 400, many)]
    first += [_row("fla_two_calls", 250, many), _row("fla_one_by_one", 240, many), _row("two_calls", 1, many)]
    second = [_row("two_phase", 21, one), _row("flash_qla_two_calls", 160, many), _row("flash_qla_in_full", 300, many)]
    files = [_figures(first, {}), _figures(second, {"flash-qla": "0.1.3"})]
    lines = {line.name: line for line in collect(files, (16, 32), GRAPH_OF_MANY)}
    assert {name: line.points for name, line in lines.items()} == {
        OURS: {1: 20, 16: 50},
        LEGACY: {1: 600},
        IN_FULL: {1: 60, 16: 300},
        FLOOR: {1: 5.0, 16: 5.0},
        "FLA": {16: 240},
        "FlashQLA": {16: 160},
    }
    assert [lines[name].label for name in ("FLA", "FlashQLA")] == ["FLA 0.6.0", "FlashQLA 0.1.3"]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content))
    target = tmp_path / "picture.png"
    assert draw_figure([*map(str, paths), "--output", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert draw_figure([str(paths[0]), "--heads", "4", "8", "--output", str(target)]) == 1
    complaint = capsys.readouterr().err
    assert "no times of" in complaint and f"--heads 16 32 --mode '{GRAPH_OF_MANY}'" in complaint


def test_figure_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = _figures([_row("two_phase", 20, "1 x 128 + 4 x 16")], {})
    (table,) = figures["tables"]
    table["title"] = "delta rule alone: H_k 4, H_v 8, D 64, float32, fp32 states"
    table |= {"heads": [4, 8], "consumers": {"1 x 128 + 4 x 16": 4}, "floors": {"1 x 128 + 4 x 16": 5.0}}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(figures))
    drawn: list[tuple[str, str]] = []
    monkeypatch.setattr("benchmarks.figure.draw", lambda lines, title, facts, output: drawn.append((title, facts)))
    assert draw_figure([str(path), "--heads", "4", "8"]) == 0
    ((title, facts),) = drawn
    assert title == "A shared prefix of 128 tokens, continued by 4 to 4 suffixes of 16"
    assert "H_k 4, H_v 8, D 64, float32, fp32 states" in facts


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=8), st.floats(1.01, 1.5))
def test_labels_are_spread_in_order(heights: list[float], gap: float) -> None:
    places = spread(heights, gap)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    assert all(places[high] >= places[low] * gap * 0.99 for low, high in pairwise(order))


def test_timer_counts_calls() -> None:
    calls: list[int] = []
    Timer(torch.device("cpu"), warmups=2, repetitions=3).eager(lambda: calls.append(1))
    assert len(calls) == 5


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = [(replace(shape, dim=16), (Load.of(1, 9, 2, 3),)) for shape in SHAPES]
    monkeypatch.setattr("benchmarks.report.plan", lambda device, long: tiny)
    target = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--no-model", "--warmups", "1", "--repetitions", "2", "--json", str(target)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    figures = json.loads(target.read_text())
    assert torch.__version__ in printed
    assert all(arm.title in printed for arm in ARMS)
    assert [len(table["rows"]) for table in figures["tables"]] == [len(ARMS)] * 2
    assert {"device", "torch", "triton", "commit", "copy bandwidth"} <= set(figures["environment"])
    for shape, table in zip(SHAPES, figures["tables"], strict=True):
        [comparison] = table["comparisons"]
        assert comparison["in_full"]["arm"] == "in_full"
        assert comparison["floor"] == table["floors"]["1 x 9 + 2 x 3"] > 0
        assert (table["heads"], table["conv_width"]) == ([shape.heads_k, shape.heads_v], shape.conv_width)


def test_report_of_parts_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.report.WHOLE_LAYER", Shape(4, 8, 16))
    monkeypatch.setattr("benchmarks.report.QUARTER", Shape(8, 8, 16))
    target = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--no-model", "--no-loads", "--parts", "--shapes", "1/2", "--warmups", "1"]
    assert main([*arguments, "--repetitions", "1", "--json", str(target)]) == 0
    [table] = json.loads(target.read_text())["tables"]
    assert {row["arm"] for row in table["rows"]} == {"ours", "copy", "path", "in_full", "plain"}


def test_report_names_a_wrong_arm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.report.plan", lambda device, long: [(SHAPES[0], (Load.of(1, 9, 2, 3),))])
    monkeypatch.setattr(TwoPhase, "run", lambda self: [torch.zeros_like(self.part.tokens[2])])
    arguments = ["--device", "cpu", "--no-model", "--warmups", "1", "--repetitions", "1", "--arms", "two_phase"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "not timed: two-phase, one packed call: 1 x 9 + 2 x 3: RuntimeError: " in printed.err
    assert "relative error" in printed.err
    assert TwoPhase.title not in printed.out


@pytest.fixture
def random_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model in the embedded one's architecture, which needs no accuracy to be compared with itself."""
    from ckpt_hf.demo import tokenizer
    from ckpt_hf.demo.architecture import make_config, make_model

    torch.manual_seed(0)
    text_tokenizer = tokenizer.build()
    model = make_model(make_config(text_tokenizer)).eval()
    monkeypatch.setattr("benchmarks.embedded.load_model", lambda device: (model, text_tokenizer))


@pytest.mark.slow
@pytest.mark.usefixtures("random_model")
def test_embedded_arms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import embedded

    timer = Timer(torch.device("cpu"), warmups=1, repetitions=1)
    rows, failures = embedded.measure_embedded(timer, seed=1, pages=2, offers=2)
    assert [row.arm for row in rows] == list(embedded.TITLES)
    assert not failures
    monkeypatch.setattr(embedded.Catalog, "generate", lambda self, batches: [torch.rand(2, 4)])
    assert len(embedded.measure_embedded(timer, seed=1, pages=1, offers=2)[1]) == 3


def test_the_readme_s_run_is_recorded_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "run.png"
    assert draw_run(["--output", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "24 requests" in told
    assert re.search(r"\d+ waited for a\s+checkpoint", told)

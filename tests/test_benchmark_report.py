"""The report: the loads it runs, its summaries, its exit code. Nothing here depends on how long a call took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.arms import ARMS, TwoPhase
from benchmarks.loads import SHARD, WHOLE_LAYER, Load, on_cpu
from benchmarks.measure import Timer, Timing
from benchmarks.report import main, parse_arguments, plan
from benchmarks.tables import format_table, make_rows

SHAPES = [on_cpu(WHOLE_LAYER), on_cpu(SHARD)]


def test_the_published_loads_and_shapes() -> None:
    (whole, loads), (shard, shard_loads) = plan(torch.device("cuda"), long=False)
    assert (whole.heads_k, whole.heads_v, whole.dim, whole.dtype) == (16, 32, 128, torch.bfloat16)
    assert (shard.heads_k, shard.heads_v, shard.conv_width) == (4, 8, 4)
    assert [(load.producers, load.consumers) for load in loads] == [((512,), (64,) * n) for n in (1, 2, 4, 8, 16)]
    assert shard_loads == loads
    options = parse_arguments([])
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
    assert {"device", "torch", "triton", "commit"} <= set(figures["environment"])


def test_report_names_a_wrong_arm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.report.plan", lambda device, long: [(SHAPES[0], (Load.of(1, 9, 2, 3),))])
    monkeypatch.setattr(TwoPhase, "run", lambda self: [torch.zeros_like(self.part.tokens[2])])
    arguments = ["--device", "cpu", "--no-model", "--warmups", "1", "--repetitions", "1", "--arms", "two_phase"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "not timed: two-phase, one packed call: 1 x 9 + 2 x 3: relative error" in printed.err
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

"""Metrics, traces and reasons of real runs: what they say is what the model did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_hf
from ckpt_hf import trace
from ckpt_hf.events import FIELDS
from ckpt_hf.reasons import Reason
from ckpt_hf.run_record import Run
from ckpt_hf.trace_events import read_trace
from ckpt_hf.trace_runs import read_run

from .models import alone, build_model, generate, patched_model, plain_model, random_ids, shared_prompts
from .tokenizers import unmarked

ANCHOR = 200


def serve(engine: Any, rows: list[list[int]], at: int, **options: Any) -> list[Any]:
    settings = {"max_new_tokens": 5, "do_sample": False} | options
    handles = [engine.submit(row, checkpoint_positions=[at], **settings) for row in rows]
    return [handle.result(120) for handle in handles]


@pytest.fixture(params=["engine", "generate"])
def observed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Run, dict[str, Any], list[list[int]], Any]:
    """A run of six prompts that share an anchor longer than a step, seen through trace, metrics and audit."""
    rows = shared_prompts(ANCHOR, [10, 20, 5, 30, 12, 9])
    path = tmp_path / "run.jsonl"
    if request.param == "engine":
        with ckpt_hf.Engine(build_model(), max_batch_tokens=128) as engine:
            metrics, auditor = ckpt_hf.collect_metrics(engine), ckpt_hf.audit_hits(engine, every=2)
            with ckpt_hf.write_trace(engine, path):
                serve(engine, rows, ANCHOR)
    else:
        with patched_model(max_batch_tokens=128) as model:
            metrics, auditor = ckpt_hf.collect_metrics(model), ckpt_hf.audit_hits(model, every=2)
            with ckpt_hf.write_trace(model, path):
                generate(model, rows, checkpoint_positions=[[ANCHOR]] * 6, max_new_tokens=5)
    found = read_trace(path)
    assert (found.lost, found.unreadable) == (0, 0)
    assert {timed.event.kind for timed in found.events} <= set(FIELDS)
    return read_run(found.events), metrics.as_dict(), rows, auditor


def test_the_trace_tells_what_happened(observed: tuple[Run, dict[str, Any], list[list[int]], Any]) -> None:
    run, _, rows, _ = observed
    assert sorted(row.prompt_tokens for row in run.rows.values()) == sorted(map(len, rows))
    assert all(row.outcome is not None and row.first_token is not None for row in run.rows.values())
    assert sorted(row.cached for row in run.rows.values()) == [0] + [ANCHOR] * 5
    assert all(row.cached + row.computed == row.prompt_tokens for row in run.rows.values())
    (producer,) = [row for row in run.rows.values() if not row.cached]
    assert producer.missed == {ANCHOR: Reason.NEVER_SEEN.value} and len(producer.published) == 1
    assert run.waits and {wait.producer for wait in run.waits} == {producer.request}
    (use,) = run.checkpoints.values()
    assert (use.tokens, use.producer, len(use.consumers)) == (ANCHOR, producer.request, 5)
    assert all(bar.stop > bar.start and not bar.failed for bar in run.steps)
    assert max(bar.prefill + bar.decode for bar in run.steps) <= 128
    assert max(used for _, used, _ in run.slots) >= 2 and all(size > 0 for _, used, size in run.slots if used)


def test_the_metrics_agree_with_the_trace(observed: tuple[Run, dict[str, Any], list[list[int]], Any]) -> None:
    run, values, rows, auditor = observed
    assert values["requests_submitted"] == sum(values["requests_finished"].values()) == 6
    assert (values["hits"], values["misses"], values["tokens_saved"]) == (5, 1, 5 * ANCHOR)
    assert values["tokens_computed"] == sum(map(len, rows)) - 5 * ANCHOR == sum(bar.prefill for bar in run.steps)
    assert values["tokens_decoded"] == 6 * 4 == sum(bar.decode for bar in run.steps)
    assert values["steps"] == len(run.steps) == values["step_seconds"]["count"]
    assert values["deferred"] == len(run.waits)
    assert (values["requests_running"], values["requests_deferred"], values["requests_waiting"]) == (0, 0, 0)
    assert (values["checkpoints"], values["checkpoints_published"]) == (1, 1)
    assert values["first_token_seconds"]["count"] == values["queue_seconds"]["count"] == 6
    assert (auditor.hits, auditor.failed) == (5, 0) and auditor.audited in (2, 3)


def test_the_command_draws_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.jsonl"
    with ckpt_hf.Engine(build_model(), max_batch_tokens=64) as engine, ckpt_hf.write_trace(engine, path):
        serve(engine, shared_prompts(130, [10, 20, 5]), 130)
    assert trace.main([str(path)]) == 0
    assert "2 waited for a checkpoint" in " ".join(capsys.readouterr().out.split())
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_watching_changes_no_token(tmp_path: Path) -> None:
    rows = shared_prompts(90, [10, 20, 5, 30])
    with ckpt_hf.Engine(build_model(), max_batch_tokens=64) as engine:
        ckpt_hf.collect_metrics(engine)
        ckpt_hf.audit_hits(engine, every=1, on_failure="raise")
        with ckpt_hf.write_trace(engine, tmp_path / "run.jsonl"):
            results = serve(engine, rows, 90)
    assert [result.generated_tokens for result in results] == alone(plain_model(), rows, max_new_tokens=5)


def test_a_sink_that_raises_changes_nothing() -> None:
    rows = shared_prompts(90, [10, 20])

    def broken(event: Any) -> None:
        raise RuntimeError("no")

    with patched_model() as model:
        ckpt_hf.runner.runner_of(model).events.add(broken)
        generate(model, rows, checkpoint_positions=[[90]] * 2)
        assert ckpt_hf.stats(model).cached_tokens == 90


def test_a_closed_trace_gets_no_more_events(tmp_path: Path) -> None:
    with patched_model() as model:
        writer = ckpt_hf.write_trace(model, tmp_path / "run.jsonl")
        writer.close()
        generate(model, shared_prompts(90, [10, 20]), checkpoint_positions=[[90]] * 2)
    assert (writer.lost, read_trace(writer.path).events) == (0, ())


def test_metrics_that_start_late_count_what_is_there() -> None:
    with patched_model() as model:
        generate(model, shared_prompts(90, [10, 20]), checkpoint_positions=[[90]] * 2)
        metrics = ckpt_hf.collect_metrics(model)
        assert metrics.as_dict()["checkpoints"] == 1
        ckpt_hf.clear(model)
        assert (metrics.as_dict()["checkpoints"], metrics.as_dict()["evictions"]) == (0, 1)


def reasons_of(model: Any, row: list[int], at: int, **options: Any) -> dict[int, str]:
    generate(model, [row], checkpoint_positions=[[at]], **options)
    (report,) = ckpt_hf.stats(model).last_rows
    return report.reasons


class TestReasons:
    def test_never_seen_then_hit(self) -> None:
        with patched_model() as model:
            row = random_ids(80, 1)
            assert reasons_of(model, row, 70) == {70: "never seen"}
            assert reasons_of(model, row, 70) == {}

    def test_evicted(self) -> None:
        with patched_model(cache_slots=1) as model:
            row = random_ids(80, 1)
            for other in (row, random_ids(80, 2)):
                reasons_of(model, other, 70)
            assert reasons_of(model, row, 70)[70] == "evicted"

    def test_no_boundary_there(self) -> None:
        with patched_model() as model:
            row = random_ids(200, 1)
            reasons_of(model, row, 190)
            assert reasons_of(model, row[:150] + random_ids(60, 2), 180) == {
                150: "no boundary there",
                180: "never seen",
            }

    @pytest.mark.parametrize(
        ("kept", "at", "reason"), [(70, 71, "seam"), (70, 70, "seam"), (69, 69, "seam"), (50, 50, "never seen")]
    )
    def test_a_seam(self, kept: int, at: int, reason: str) -> None:
        """A checkpoint of 70 tokens, and a prompt that has ``kept - 1`` of them and then goes on differently."""
        with patched_model() as model:
            row = random_ids(80, 1)
            reasons_of(model, row, 70)
            other = [*row[: kept - 1], row[kept - 1] % 50 + 1, *random_ids(20, 2)]
            assert reasons_of(model, other, at)[at] == reason

    def test_other_adapter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with patched_model() as model:
            row = random_ids(80, 1)
            reasons_of(model, row, 70)
            monkeypatch.setattr("ckpt_hf.runner.adapters_identity", lambda model: b"another adapter")
            assert reasons_of(model, row, 70) == {70: "other adapter"}

    def test_other_caller(self, tmp_path: Path) -> None:
        """A caller never reads of another one; the operator's trace does."""
        with patched_model() as model:
            row = random_ids(80, 1)
            reasons_of(model, row, 70, checkpoint_salt="secret tenant")
            with ckpt_hf.write_trace(model, tmp_path / "run.jsonl") as writer:
                assert reasons_of(model, row, 70, checkpoint_salt="another") == {70: "never seen"}
            text = writer.path.read_text()
            assert "other caller" in text
            assert "secret tenant" not in text and "another" not in text


def test_the_examples_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    examples = re.findall(r"<!-- watch-example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    monkeypatch.chdir(tmp_path)
    tokenizer = unmarked("bpe")
    anchor = "the same product or another one? item 12: blue mug, item 13: blue cup\n" * 12
    prompts = [f"{anchor}red shoes {size}, leather" for size in range(39, 45)]
    with patched_model(vocab_size=512) as model:
        batch = ckpt_hf.encode(tokenizer, [[anchor, prompt.removeprefix(anchor)] for prompt in prompts])
        names: dict[str, Any] = {"ckpt_hf": ckpt_hf, "model": model, "tokenizer": tokenizer, "prompts": prompts}
        names["batch"] = batch
        for example in examples:
            exec(example, names)
        assert names["metrics"].as_dict()["hits"] == 5
        assert len(read_run(read_trace("run.jsonl").events).rows) == 6
        best = names["advice"].boundaries[0]
        assert best.prompts == 6 and set(names["batch"]["checkpoint_positions"].flatten().tolist()) == {best.position}


@pytest.mark.parametrize("as_object", [False, True], ids=["ids", "output object"])
def test_the_trace_names_the_ends_of_a_generate_call(tmp_path: Path, as_object: bool) -> None:
    rows = shared_prompts(20, [3, 4, 6])
    first, second, third = alone(plain_model(), rows, max_new_tokens=5)
    assert len({first[0], *second, *third}) > len({*second, *third}), "the end token ends the first row alone"

    def criterion(ids: Any, scores: Any) -> Any:
        return (ids[:, -3:].cpu() == torch.tensor(second[:3])).all(-1).to(ids.device)

    settings = {"eos_token_id": first[0], "pad_token_id": 0, "stopping_criteria": [criterion]}
    with patched_model() as model:
        metrics = ckpt_hf.collect_metrics(model)
        with ckpt_hf.write_trace(model, tmp_path / "run.jsonl"):
            positions = [[20]] * 3
            settings |= {"checkpoint_positions": positions, "return_dict_in_generate": as_object}
            generate(model, rows, max_new_tokens=5, **settings)
    run = read_run(read_trace(tmp_path / "run.jsonl").events)
    ends = {row.prompt_tokens: row.outcome for row in run.rows.values()}
    assert ends == {23: "eos", 24: "stop", 26: "length"}
    assert metrics.as_dict()["requests_finished"] == {"eos": 1, "stop": 1, "length": 1}

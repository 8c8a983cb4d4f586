"""Audits of hits: right ones pass by a wide margin, states that are not the prompt's own never do."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckpt_hf
from ckpt_hf.audit import AuditError, Auditor, audit_tolerance
from ckpt_hf.runner import runner_of

from .models import alone, generate, new_tokens, patched_model, plain_model, random_ids, shared_prompts

ANCHOR, SUFFIXES = 70, (5, 12, 3, 20)


def rows_after(model: Any) -> list[list[int]]:
    """A call whose anchor is cached afterwards, and prompts of the next call."""
    generate(model, shared_prompts(ANCHOR, [4], seed=9), checkpoint_positions=[[ANCHOR]])
    anchor = shared_prompts(ANCHOR, [4], seed=9)[0][:ANCHOR]
    return [anchor + random_ids(length, 50 + length) for length in SUFFIXES]


def again(model: Any, rows: list[list[int]]) -> Any:
    return generate(model, rows, checkpoint_positions=[[ANCHOR]] * len(rows))


def the_slot(model: Any) -> int:
    (checkpoint,) = runner_of(model).index.checkpoints
    assert checkpoint.slot is not None
    return checkpoint.slot


def zero(pool: torch.Tensor, slot: int) -> None:
    pool[slot] = 0


def scale(pool: torch.Tensor, slot: int) -> None:
    pool[slot] *= 1.5


def shuffle(pool: torch.Tensor, slot: int) -> None:
    pool[slot] = pool[slot].flip(0)


def not_a_number(pool: torch.Tensor, slot: int) -> None:
    pool[slot].view(-1)[0] = math.nan


@pytest.mark.parametrize("kind", ["dense-2", "moe-2"])
def test_right_hits_pass_with_room_to_spare(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with patched_model(kind) as model:
        rows = rows_after(model)
        auditor = ckpt_hf.audit_hits(model, every=1, on_failure="raise")
        result = again(model, rows)
        assert new_tokens(result, rows) == alone(plain_model(kind), rows)
        assert (auditor.hits, auditor.audited, auditor.failed, auditor.skipped) == (4, 4, 0, 0)
        report = auditor.last
        assert report is not None and report.passed
        assert (report.cached_tokens, report.prompt_tokens) == (ANCHOR, ANCHOR + SUFFIXES[-1])
        assert report.state_error is not None and report.worst_layer in runner_of(model).states.recurrent
        assert 0 < auditor.largest_error < report.tolerance / 10
    assert not [record for record in caplog.records if record.name.startswith("ckpt_hf")]


@pytest.mark.parametrize("damage", [zero, scale, shuffle, not_a_number])
@pytest.mark.parametrize("pools", ["recurrent", "conv"])
def test_a_wrong_state_is_found(
    damage: Callable[[torch.Tensor, int], None], pools: str, caplog: pytest.LogCaptureFixture
) -> None:
    with patched_model() as model, caplog.at_level(logging.ERROR):
        # Right behind the boundary, where the convolution still reads the checkpoint's own columns.
        rows = [row[: ANCHOR + 2] for row in rows_after(model)]
        for pool in getattr(runner_of(model).states, pools).values():
            damage(pool, the_slot(model))
        auditor = ckpt_hf.audit_hits(model, every=1)
        again(model, rows)
        assert auditor.failed == auditor.audited == 4
        assert auditor.largest_error > 30 * audit_tolerance(torch.float32)
    records = [record for record in caplog.records if record.name.startswith("ckpt_hf")]
    assert len(records) == 4
    assert f"({ANCHOR} of {ANCHOR + 2} tokens cached)" in records[0].message


def test_a_state_of_another_prompt_is_found_by_states_and_logits() -> None:
    with patched_model() as model:
        rows = rows_after(model)
        slot = the_slot(model)
        generate(model, [random_ids(80, 77)], checkpoint_positions=[[ANCHOR]])
        other = next(c.slot for c in runner_of(model).index.checkpoints if c.slot != slot)
        for pool in (*runner_of(model).states.recurrent.values(), *runner_of(model).states.conv.values()):
            pool[slot] = pool[other]
        auditor = ckpt_hf.audit_hits(model, every=1)
        again(model, rows)
        assert auditor.failed == 4 and auditor.last is not None
        assert auditor.last.logits_error > 0.1 and (auditor.last.state_error or 0) > 0.1


def test_raise_ends_the_call_and_the_model_goes_on() -> None:
    with patched_model() as model:
        rows = rows_after(model)
        for pool in runner_of(model).states.recurrent.values():
            scale(pool, the_slot(model))
        ckpt_hf.audit_hits(model, every=1, on_failure="raise")
        with pytest.raises(AuditError, match="logits that differ"):
            again(model, rows)
        ckpt_hf.clear(model)
        assert new_tokens(again(model, rows), rows) == alone(plain_model(), rows)


@pytest.mark.parametrize("every", [2, 3, 7])
def test_one_hit_in_so_many(every: int) -> None:
    with patched_model() as model:
        rows = rows_after(model)
        auditor = ckpt_hf.audit_hits(model, every=every, seed=every)
        for _ in range(every):
            again(model, rows[:2])
        assert (auditor.hits, auditor.audited) == (2 * every, 2)


def test_requests_that_hit_nothing_are_not_audited() -> None:
    with patched_model() as model:
        auditor = ckpt_hf.audit_hits(model, every=1)
        generate(model, [random_ids(40, 3)], checkpoint_positions=[[20]])
        assert (auditor.hits, auditor.audited, auditor.last) == (0, 0, None)


def test_a_hit_of_the_whole_prompt_is_audited() -> None:
    with patched_model() as model:
        rows = [random_ids(40, 3)]
        for _ in range(2):
            generate(model, rows, checkpoint_positions=[[40]])
        auditor = ckpt_hf.audit_hits(model, every=1, on_failure="raise")
        generate(model, rows, checkpoint_positions=[[40]])
        assert (auditor.audited, auditor.failed) == (1, 0)


def test_no_memory_for_an_audit_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Auditor, "_compare", short)
    with patched_model() as model:
        rows = rows_after(model)
        auditor = ckpt_hf.audit_hits(model, every=1, on_failure="raise")
        again(model, rows)
        assert (auditor.hits, auditor.audited, auditor.skipped, auditor.failed) == (4, 0, 4, 0)


def test_the_tolerance_lies_between_rounding_and_faults() -> None:
    assert 5e-4 < audit_tolerance(torch.float32) < 2e-3
    assert audit_tolerance(torch.bfloat16) == audit_tolerance(torch.float32, torch.bfloat16) == 0.1
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert audit_tolerance(torch.float32) == 0.1
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(
    "arguments", [{"every": 0}, {"every": 1.5}, {"every": True}, {"tolerance": 0.0}, {"on_failure": "ignore"}]
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with patched_model(verify=False) as model, pytest.raises(ckpt_hf.CheckpointValueError, match=next(iter(arguments))):
        ckpt_hf.audit_hits(model, **arguments)

"""The engine's benchmark: every arm answers as one call a prompt does. Nothing is timed."""

from __future__ import annotations

import torch

from benchmarks.engine_load import Load, measure
from benchmarks.model_scale import build_model


def test_every_arm_gives_the_same_answers() -> None:
    model = build_model("tiny", "cpu", torch.float32)
    rows = list(measure(model, Load(anchors=2, prefix=70, consumers=3, suffix=5), new_tokens=3, repetitions=1))
    assert len({row["arm"] for row in rows}) == len(rows) == 7
    assert {row["equal_answers"] for row in rows} == {1.0}
    assert all(row["requests_per_s"] > 0 and row["next_token_median_ms"] > 0 for row in rows)


def test_one_new_token_has_no_next() -> None:
    model = build_model("tiny", "cpu", torch.float32)
    rows = list(measure(model, Load(anchors=1, prefix=5, consumers=2, suffix=3), new_tokens=1, repetitions=1))
    assert {row["next_token_median_ms"] for row in rows} == {None}


def test_prefixes_are_shared_or_not() -> None:
    load = Load(anchors=2, prefix=30, consumers=3, suffix=5)
    shared, apart = load.rows(100), load.rows(100, shared=False)
    assert len({tuple(row[:30]) for row in shared}) == 2
    assert len({tuple(row[:30]) for row in apart}) == 6

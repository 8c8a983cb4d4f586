"""Arguments of the wrong kind, and settings of the process that the ops must not depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckpt_ops
from ckpt_ops import ArgumentError, Segment, SegmentTable


def _arguments() -> dict[str, Any]:
    tokens, heads, dim = 5, 2, 16
    shape = (tokens, heads, dim)
    named: dict[str, Any] = {name: torch.randn(shape) for name in ("q", "k", "v")}
    named |= {"g": -torch.rand(tokens, heads), "beta": torch.rand(tokens, heads)}
    return named | {"states": torch.zeros(3, heads, dim, dim)}


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "states"])
def test_what_is_no_tensor_is_named(name: str) -> None:
    table = SegmentTable.from_cu_seqlens([0, 5], 3, "cpu")
    with pytest.raises(ArgumentError, match=f"{name} must be a tensor, got NoneType"):
        ckpt_ops.gdn_prefill(**_arguments() | {name: None}, table=table)


def test_wrong_tables_and_slots_are_named() -> None:
    table: Any = [0, 5]
    slots: Any = [0, 1, 2, -1, -1]
    with pytest.raises(ArgumentError, match="table must be a SegmentTable, got list"):
        ckpt_ops.gdn_prefill(**_arguments(), table=table)
    with pytest.raises(ArgumentError, match="slots must be a tensor, got list"):
        ckpt_ops.gdn_decode(**_arguments(), slots=slots)


@pytest.mark.parametrize("segment", [None, Segment(2.5), Segment(2, destination="1")])  # type: ignore[arg-type]
def test_segments_hold_integers(segment: Any) -> None:
    with pytest.raises(ArgumentError, match=r"segments\[0\]\.\w+ must be an integer"):
        SegmentTable.build([segment], 3, "cpu")


def test_a_table_does_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        table = SegmentTable.from_cu_seqlens([0, 2, 5], 3, "cpu", destinations=[1, 2])
    assert table.cu_seqlens.device.type == "cpu"
    assert table.cu_seqlens.tolist() == [0, 2, 5]


def test_inputs_that_require_a_gradient_are_refused() -> None:
    q = torch.zeros(1, 1, 16, requires_grad=True)
    gate = torch.zeros(1, 1)
    states = torch.zeros(1, 1, 16, 16)
    table = SegmentTable.build([Segment(1, destination=0)], 1, "cpu")
    with pytest.raises(ArgumentError, match="q requires a gradient"):
        ckpt_ops.two_phase_gdn_prefill(q, q, q, gate, gate, states, table)
    with torch.no_grad():
        assert ckpt_ops.two_phase_gdn_prefill(q, q, q, gate, gate, states, table).shape == q.shape

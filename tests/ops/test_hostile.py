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


@pytest.mark.parametrize("num_slots", ["x", 2.5, None, 2**40])
def test_the_number_of_slots_is_an_integer(num_slots: Any) -> None:
    with pytest.raises(ArgumentError, match="num_slots must be"):
        SegmentTable.build([], num_slots=num_slots, device="cpu")
    with pytest.raises(ArgumentError, match="num_slots must be"):
        SegmentTable.from_cu_seqlens([0, 1], num_slots, "cpu")


def test_what_a_table_cannot_be_made_of_is_named() -> None:
    wrong: Any
    for wrong, message in ((5, "segments must be a sequence, got int"), (None, "segments must be .* got NoneType")):
        with pytest.raises(ArgumentError, match=message):
            SegmentTable.build(wrong, 3, "cpu")
    for wrong in ("nowhere", 2.5, None):
        with pytest.raises(ArgumentError, match=f"device must be a device of torch or its name, got {wrong!r}"):
            SegmentTable.build([], 3, wrong)
    for wrong, message in ((5, "cu_seqlens must be a sequence"), ([0, 2.5], r"cu_seqlens\[1\] must be an integer")):
        with pytest.raises(ArgumentError, match=message):
            SegmentTable.from_cu_seqlens(wrong, 3, "cpu")
    wrong = ["a"]
    with pytest.raises(ArgumentError, match=r"sources\[0\] must be an integer, got 'a'"):
        SegmentTable.from_cu_seqlens([0, 1], 3, "cpu", sources=wrong)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "states"])
def test_sparse_layouts_are_refused_by_the_delta_rule(name: str) -> None:
    arguments = _arguments()
    arguments[name] = arguments[name].to_sparse()
    table = SegmentTable.from_cu_seqlens([0, 5], 3, "cpu")
    slots = torch.tensor([0, 1, 2, -1, -1], dtype=torch.int32)
    for function, batch in (
        (ckpt_ops.gdn_prefill, {"table": table}),
        (ckpt_ops.two_phase_gdn_prefill, {"table": table}),
        (ckpt_ops.gdn_decode, {"slots": slots}),
    ):
        with pytest.raises(ArgumentError, match=f"{name} must be a dense tensor .* got layout torch.sparse_coo"):
            function(**arguments, **batch)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "a", "b", "a_log", "dt_bias", "states", "slots"])
def test_sparse_layouts_are_refused_by_the_convolution(name: str) -> None:
    arguments: dict[str, Any] = {"x": torch.randn(2, 6), "weight": torch.randn(6, 4), "bias": torch.randn(6)}
    arguments |= {"a": torch.randn(2, 3), "b": torch.randn(2, 3), "a_log": torch.randn(3), "dt_bias": torch.randn(3)}
    arguments |= {"states": torch.zeros(2, 6, 3), "slots": torch.tensor([0, 1], dtype=torch.int32)}
    arguments[name] = arguments[name].to_sparse()
    with pytest.raises(ArgumentError, match=f"{name} must be a dense tensor"):
        ckpt_ops.conv_gates_decode(**arguments)
    if name == "slots":
        return
    del arguments["slots"]
    with pytest.raises(ArgumentError, match=f"{name} must be a dense tensor"):
        ckpt_ops.conv_gates_prefill(**arguments, table=SegmentTable.from_cu_seqlens([0, 2], 2, "cpu"))


def test_gates_to_check_are_dense_tensors() -> None:
    gate: Any
    for gate, message in ((None, "g must be a tensor, got NoneType"), (torch.zeros(2, 2).to_sparse(), "g must be a d")):
        with pytest.raises(ArgumentError, match=message):
            ckpt_ops.check_gates(gate, torch.zeros(2, 2))


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

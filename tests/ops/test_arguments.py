"""Every wrong argument of the ops' functions is refused by name, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ckpt_ops
from ckpt_ops import ArgumentError, Segment, SegmentTable
from ckpt_ops.testing import make_delta_rule_inputs, make_pool

Arguments = dict[str, Any]


def _delta_rule() -> Arguments:
    inputs = make_delta_rule_inputs(6, 2, 4, 16, 8)
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g, "beta": inputs.beta}


def prefill_arguments() -> Arguments:
    segments = [Segment(4, destination=0), Segment(2, source=1)]
    return _delta_rule() | {"states": make_pool(3, 4, 16, 8), "table": SegmentTable.build(segments, 3, "cpu")}


def decode_arguments() -> Arguments:
    slots = torch.tensor([0, 1, 2, -1, 3, 4], dtype=torch.int32)
    return _delta_rule() | {"states": make_pool(6, 4, 16, 8), "slots": slots}


def conv_arguments() -> Arguments:
    table = SegmentTable.build([Segment(4, destination=0), Segment(2, source=1)], 3, "cpu")
    return {
        "x": make_pool(6, 10),
        "weight": make_pool(10, 4),
        "bias": make_pool(10),
        "states": make_pool(3, 10, 3),
        "table": table,
    }


def conv_decode_arguments() -> Arguments:
    arguments = conv_arguments()
    del arguments["table"]
    return arguments | {"slots": torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32)}


def _gates() -> Arguments:
    return {"a": make_pool(6, 3), "b": make_pool(6, 3), "a_log": make_pool(3), "dt_bias": make_pool(3)}


def conv_gates_arguments() -> Arguments:
    return conv_arguments() | _gates()


def conv_gates_decode_arguments() -> Arguments:
    return conv_decode_arguments() | _gates()


GDN: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda q: q[0], "q must have 3 dimensions"),
    ("q", lambda q: q.long(), "q must be float32, bfloat16 or float16"),
    ("q", lambda q: q.to("meta"), "must be on meta"),
    ("q", lambda q: q[:, :, :8], "k must have shape"),
    ("q", lambda q: q.half(), r"k must have q's dtype torch\.float16"),
    ("k", lambda k: k[:, :1], r"k must have shape \(6, 2, 16\)"),
    ("k", lambda k: k.half(), r"k must have q's dtype torch\.float32, got torch\.float16"),
    ("k", lambda k: k.to("meta"), "k must be on cpu"),
    ("v", lambda v: v[:5], "v must have one row for each of q's 6 tokens, got 5"),
    ("v", lambda v: v[:, :3], "v's head count must be a positive multiple of q's 2, got 3"),
    ("v", lambda v: v[:, :0], "v's head count"),
    ("v", lambda v: v[..., :0], "v's head dimension must be from 1 to 256, got 0"),
    ("v", lambda v: v.repeat(1, 1, 33), "v's head dimension must be from 1 to 256, got 264"),
    ("v", lambda v: v.bfloat16(), "v must have q's dtype"),
    ("g", lambda g: g[:, :2], r"g must have shape \(6, 4\)"),
    ("g", lambda g: g.int(), "g must be float32"),
    ("beta", lambda beta: beta[:5], r"beta must have shape \(6, 4\)"),
    ("beta", lambda beta: beta[0], "beta must have 2 dimensions"),
    ("states", lambda states: states.mT, r"states must be \[num_slots, H_v, D_k, D_v\]"),
    ("states", lambda states: states.mT.contiguous().mT, "states must be contiguous"),
    ("states", lambda states: states[0], "states must have 4 dimensions"),
    ("states", lambda states: states.to("meta"), "states must be on cpu"),
    ("scale", lambda _: float("nan"), "scale must be a finite number, got nan"),
    ("scale", lambda _: float("inf"), "scale must be a finite number, got inf"),
    ("scale", lambda _: "0.1", "scale must be a finite number, got '0.1'"),
    ("scale", lambda _: True, "scale must be a finite number, got True"),
    ("scale", lambda _: torch.tensor(0.1), r"scale must be a finite number, got tensor\(0\.1"),
]
CONV: list[tuple[str, Callable[[Any], Any], str]] = [
    ("x", lambda x: x[0], "x must have 2 dimensions"),
    ("x", lambda x: x.int(), "x must be float32"),
    ("weight", lambda weight: weight[:9], "weight must be"),
    ("weight", lambda weight: weight[:, :1], "W from 2 to 8"),
    ("weight", lambda weight: weight.repeat(1, 3), "W from 2 to 8"),
    ("weight", lambda weight: weight.to("meta"), "weight must be on cpu"),
    ("bias", lambda bias: bias[:9], r"bias must have shape \(10,\)"),
    ("bias", lambda bias: bias.to("meta"), "bias must be on cpu"),
    ("activation", lambda _: "gelu", "activation must be None or 'silu', got 'gelu'"),
    # transformers keeps W columns, this package W - 1
    ("states", lambda states: torch.cat([states, states[..., :1]], -1), r"states must be \[num_slots, C, W - 1\]"),
    ("states", lambda states: states.mT.contiguous().mT, "states must be contiguous"),
]
GATES: list[tuple[str, Callable[[Any], Any], str]] = [
    ("a", lambda a: a[:5], r"a must have shape \(6, 3\)"),
    ("a", lambda a: a[0], "a must have 2 dimensions"),
    ("a", lambda a: a[:, :0], r"a must be \[T, H_v\] with at least one head, got \(6, 0\)"),
    ("a", lambda a: a[:, :2], r"b must have shape \(6, 2\)"),
    ("a", lambda a: a.int(), "a must be float32"),
    ("a", lambda _: None, "a must be a tensor, got NoneType"),
    ("a", lambda a: a.requires_grad_(), "a requires a gradient"),
    ("b", lambda b: b.to("meta"), "b must be on cpu"),
    ("b", lambda b: b.t(), r"b must have shape \(6, 3\)"),
    ("a_log", lambda a_log: a_log[:2], r"a_log must have shape \(3,\) \(\[H_v\] as in a\)"),
    ("a_log", lambda a_log: a_log[None], "a_log must have 1 dimensions"),
    ("dt_bias", lambda _: 0.5, "dt_bias must be a tensor, got float"),
    ("dt_bias", lambda dt_bias: dt_bias.to("meta"), "dt_bias must be on cpu"),
]
TABLE: list[tuple[str, Callable[[Any], Any], str]] = [
    ("table", lambda _: SegmentTable.build([Segment(5)], 3, "cpu"), "must have the table's 5 tokens, got 6"),
    ("table", lambda _: SegmentTable.build([Segment(6)], 4, "cpu"), "states must have at least the 4 slots"),
    ("table", lambda _: SegmentTable.build([Segment(6)], 3, "meta"), "table must be on cpu"),
]
SLOTS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("slots", lambda slots: slots.long(), "slots must be int32"),
    ("slots", lambda slots: slots[:5], "one entry for each of"),
    ("slots", lambda slots: slots.to("meta"), "slots must be on cpu"),
    ("slots", lambda slots: slots.clone().fill_(100), r"slots\[0\] must be -1 or from 0 to \d, got 100"),
    ("slots", lambda slots: slots.clone().fill_(-2), r"slots\[0\] must be -1 or from 0 to \d, got -2"),
    ("slots", lambda slots: slots.clone().fill_(1), "slots other than -1 must differ"),
]
CASES = [
    *[(ckpt_ops.gdn_prefill, prefill_arguments, *case) for case in GDN + TABLE],
    *[(ckpt_ops.two_phase_gdn_prefill, prefill_arguments, *case) for case in GDN + TABLE],
    *[(ckpt_ops.gdn_decode, decode_arguments, *case) for case in GDN + SLOTS],
    *[(ckpt_ops.causal_conv1d_prefill, conv_arguments, *case) for case in CONV + TABLE],
    *[(ckpt_ops.causal_conv1d_decode, conv_decode_arguments, *case) for case in CONV + SLOTS],
    *[(ckpt_ops.conv_gates_prefill, conv_gates_arguments, *case) for case in CONV + GATES + TABLE],
    *[(ckpt_ops.conv_gates_decode, conv_gates_decode_arguments, *case) for case in CONV + GATES + SLOTS],
]


@pytest.mark.parametrize(
    ("function", "make", "name", "spoil", "message"), CASES, ids=lambda x: getattr(x, "__name__", None)
)
def test_refused(
    function: Callable[..., Any],
    make: Callable[[], Arguments],
    name: str,
    spoil: Callable[[Any], Any],
    message: str,
) -> None:
    arguments = make()
    before = arguments["states"].clone()
    spoiled = arguments | {name: spoil(make().get(name))}
    with pytest.raises(ArgumentError, match=message):
        _call(function, spoiled)
    assert torch.equal(arguments["states"], before)
    _call(function, arguments)


def _call(function: Callable[..., Any], arguments: Arguments) -> Any:
    return function(**arguments)


def test_parents_need_the_two_phase_function() -> None:
    arguments = prefill_arguments()
    arguments["table"] = SegmentTable.build([Segment(4, destination=0), Segment(2, parent=0)], 3, "cpu")
    with pytest.raises(ArgumentError, match="table must have no parents for gdn_prefill, but it has 2 phases"):
        ckpt_ops.gdn_prefill(**arguments)
    ckpt_ops.two_phase_gdn_prefill(**arguments)


def test_check_gates() -> None:
    g, beta = torch.tensor([[-1.0, 0.0]]), torch.tensor([[0.5, 1.0]])
    ckpt_ops.check_gates(g, beta)
    ckpt_ops.check_gates(g[:0], beta[:0])
    with pytest.raises(ArgumentError, match="g must be finite, but 1 of 2 values are NaN"):
        ckpt_ops.check_gates(torch.tensor([torch.nan, -1.0]), beta)
    with pytest.raises(ArgumentError, match="beta must be finite"):
        ckpt_ops.check_gates(g, torch.tensor([torch.nan]))
    with pytest.raises(ArgumentError, match=r"g must be at most 0 .* 0\.25"):
        ckpt_ops.check_gates(torch.tensor([0.25, -1.0]), beta)

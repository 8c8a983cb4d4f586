"""Every plain kernel compiles ahead of time for each architecture, as launched there, and its shared memory fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from aot import LIMITS, Recorder, check_all_fit, record

from ckpt_ops import Segment, SegmentTable, launch, launch_attention, launch_conv, launch_plain
from ckpt_ops.blocks import Config, choose_config
from ckpt_ops.testing import make_delta_rule_inputs, make_pool

# Each class of block sizes, a head dimension that is no power of two, and both half types.
SHAPES = [
    (torch.bfloat16, 128, 128),
    (torch.bfloat16, 96, 40),
    (torch.bfloat16, 256, 256),
    (torch.float16, 64, 64),
    (torch.float32, 64, 64),
    (torch.float32, 256, 256),
]
# sm_90 has other kernels for some heads.
LAUNCHED = [
    (dtype, dim_k, dim_v, capability)
    for dtype, dim_k, dim_v in SHAPES
    for capability in LIMITS
    if not choose_config(capability, dim_k, dim_v, dtype).hopper
]
LAUNCHERS = {
    "intra": launch_plain._INTRA,
    "chain": launch_plain._CHAIN,
    "decode": launch._DECODE,
    "conv": launch_conv._PREFILL,
    "conv_decode": launch_conv._DECODE,
}


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    return record(monkeypatch, LAUNCHERS)


def use_config_of(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block sizes of an architecture, whatever runs the test, and the plain kernels."""

    def config(_: torch.device, *shape: Any) -> Config:
        return replace(choose_config(capability, *shape), hopper=False)

    monkeypatch.setattr(launch, "config_for", config)


def run_delta_rule(lengths: tuple[int, int], heads: tuple[int, int, int, int], dtype: torch.dtype, rows: int) -> None:
    """A Producer and a Consumer of these lengths, and a decode step."""
    heads_k, heads_v, dim_k, dim_v = heads
    segments = [Segment(lengths[0], destination=0), Segment(lengths[1], parent=0, destination=1)]
    table = SegmentTable.build(segments, 2, "cpu")
    inputs = make_delta_rule_inputs(sum(lengths), heads_k, heads_v, dim_k, dim_v, dtype=dtype)
    states = make_pool(2, heads_v, dim_k, dim_v)
    links = (table.cu_seqlens, states, table.sources, table.destinations)
    launch.two_phase_gdn_prefill(*inputs.tensors(), *links, table.parents, table.phase_offsets)
    launch.gdn_decode(*inputs.rows(0, rows).tensors(), states, torch.zeros(rows, dtype=torch.int32))


def run_convolution(lengths: tuple[int, int], channels: int, heads: int, dtype: torch.dtype, rows: int) -> None:
    """A Producer and a Consumer of these lengths and a decode step, without and with gates."""
    segments = [Segment(lengths[0], destination=0), Segment(lengths[1], parent=0, destination=1)]
    table = SegmentTable.build(segments, 2, "cpu")
    tokens = sum(lengths)
    x, weight, bias = (make_pool(*shape, dtype=dtype) for shape in ((tokens, channels), (channels, 4), (channels,)))
    states, slots = make_pool(2, channels, 3, dtype=dtype), torch.zeros(rows, dtype=torch.int32)
    links = (table.cu_seqlens, states, table.sources, table.destinations, table.parents)
    a, b = make_pool(tokens, heads, dtype=dtype), make_pool(tokens, heads, dtype=dtype)
    parameters = make_pool(heads), make_pool(heads)
    launch.causal_conv1d_prefill(x, weight, None, *links, "silu")
    launch.conv_gates_prefill(x, weight, None, a, b, *parameters, *links, "silu")
    launch.causal_conv1d_decode(x[:rows], weight, bias, states, slots, "silu")
    launch.conv_gates_decode(x[:rows], weight, bias, a[:rows], b[:rows], *parameters, states, slots, "silu")


@pytest.mark.parametrize(("dtype", "dim_k", "dim_v", "capability"), LAUNCHED, ids=str)
def test_delta_rule_kernels(
    monkeypatch: pytest.MonkeyPatch,
    recorders: dict[str, Recorder],
    dtype: torch.dtype,
    dim_k: int,
    dim_v: int,
    capability: int,
) -> None:
    use_config_of(capability, monkeypatch)
    run_delta_rule((64, 64), (2, 4, dim_k, dim_v), dtype, rows=2)
    assert len(recorders["chain"].launches) == 2
    for name in ("intra", "chain", "decode"):
        check_all_fit(recorders[name], capability)


@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_convolution_kernels(recorders: dict[str, Recorder], dtype: torch.dtype, capability: int) -> None:
    run_convolution((64, 64), 256, 12, dtype, rows=2)
    for name in ("conv", "conv_decode"):
        assert len(recorders[name].forms()) == 2
        check_all_fit(recorders[name], capability)


def test_compiled_forms_do_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch, recorders: dict[str, Recorder]
) -> None:
    """Compiling anew when a length or a batch size comes up for the first time stalls a server at every such length."""
    use_config_of(90, monkeypatch)
    for lengths, rows in (((64, 64), 2), ((100, 1), 1), ((101, 16), 5), ((102, 333), 16), ((1, 0), 1)):
        run_delta_rule(lengths, (2, 6, 128, 64), torch.bfloat16, rows)
        run_convolution(lengths, 208, 6, torch.bfloat16, rows)
    counts = {name: len(recorder.forms()) for name, recorder in recorders.items()}
    assert counts == {"intra": 1, "chain": 1, "decode": 1, "conv": 2, "conv_decode": 2}


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "capability"),
    [
        *((dtype, 16, 4, 256, capability) for dtype in (torch.bfloat16, torch.float32) for capability in LIMITS),
        (torch.float16, 6, 2, 40, 90),
    ],
    ids=str,
)
def test_attention_kernels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, capability: int
) -> None:
    recorders = record(monkeypatch, {"split": launch_attention._SPLIT, "combine": launch_attention._COMBINE})
    query, keys, values = (make_pool(*shape, dtype=dtype) for shape in ((2, heads, dim), *[(64, kv_heads, dim)] * 2))
    table, at = torch.zeros((3, 256), dtype=torch.int32), torch.ones(2, dtype=torch.int64)
    launch_attention.decode_attention(query, keys, values, table, at, at, dim**-0.5)
    for recorder in recorders.values():
        check_all_fit(recorder, capability)

"""The ops at the sizes of real models against fp64, in half precision, and what only many programs at once show."""

from __future__ import annotations

import pytest
import torch
from ops_harness import within
from torch import Tensor

import ckpt_ops
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.reference import (
    causal_conv1d_decode_reference,
    causal_conv1d_prefill_reference,
    gates_reference,
    gdn_decode_reference,
    gdn_prefill_reference,
)
from ckpt_ops.testing import conv_budget, delta_rule_budget, gate_budget, make_delta_rule_inputs, make_pool

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
POOLS = pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
# H_k, H_v, D and where: the CPU runs one, as proof of the test itself.
SIZES = pytest.mark.parametrize(
    ("heads_k", "heads_v", "dim", "device"),
    [
        (16, 48, 64, "cpu"),
        *(
            pytest.param(16, heads_v, dim, "cuda", marks=pytest.mark.gpu)
            for heads_v in (48, 64)
            for dim in (64, 128, 256)
        ),
    ],
)
SEGMENTS = [
    Segment(130, source=0, destination=1),
    Segment(17, destination=2),
    Segment(64, parent=0, destination=3),
    Segment(3, parent=1, destination=4),
    Segment(0, parent=1, destination=6),
    Segment(65, parent=0),
]
TOKENS = sum(segment.length for segment in SEGMENTS)


@SIZES
@POOLS
@HALVES
def test_delta_rule(
    dtype: torch.dtype, pool_dtype: torch.dtype, heads_k: int, heads_v: int, dim: int, device: str
) -> None:
    inputs = make_delta_rule_inputs(TOKENS, heads_k, heads_v, dim, dim, dtype=dtype).to(device)
    states = make_pool(7, heads_v, dim, dim, dtype=pool_dtype, used={0}).to(device)
    table = SegmentTable.build(SEGMENTS, 7, device)
    expected, expected_pool = gdn_prefill_reference(*inputs.tensors(), states, table)
    pool, written = states.clone(), [1, 2, 3, 4, 6]
    out = ckpt_ops.two_phase_gdn_prefill(*inputs.tensors(), pool, table)
    rounds = device == "cuda"
    within(out, expected, delta_rule_budget(dtype, pool_dtype, rounds_operands=rounds), "outputs")
    state_dtype = dtype if rounds else torch.float32
    budget = delta_rule_budget(state_dtype, pool_dtype, rounds_operands=rounds)
    within(pool[written], expected_pool[written], budget, "states")
    assert torch.equal(pool[[0, 5]].nan_to_num(7e4), states[[0, 5]].nan_to_num(7e4))

    rows, slots = inputs.rows(0, 5), torch.tensor([3, -1, 0, 4, 1], dtype=torch.int32, device=device)
    states, written = pool.clone(), [3, 0, 4, 1]
    expected, expected_pool = gdn_decode_reference(*rows.tensors(), states, slots)
    out = ckpt_ops.gdn_decode(*rows.tensors(), pool, slots)
    within(out, expected, delta_rule_budget(dtype, pool_dtype, rounds_operands=False), "decoded outputs")
    budget = delta_rule_budget(torch.float32, pool_dtype, rounds_operands=False)
    within(pool[written], expected_pool[written], budget, "decoded states")


@SIZES
@POOLS
@HALVES
def test_convolution_and_gates(
    dtype: torch.dtype, pool_dtype: torch.dtype, heads_k: int, heads_v: int, dim: int, device: str
) -> None:
    channels = 2 * heads_k * dim + heads_v * dim
    x, weight = make_pool(TOKENS, channels, dtype=dtype, seed=5), make_pool(channels, 4, dtype=dtype, seed=2)
    a, b = make_pool(TOKENS, heads_v, dtype=dtype, seed=6) * 8, make_pool(TOKENS, heads_v, dtype=dtype, seed=7)
    tokens = [x, weight, a, b, make_pool(heads_v, seed=8), make_pool(heads_v, seed=9)]
    x, weight, a, b, a_log, dt_bias = (tensor.to(device) for tensor in tokens)
    states = make_pool(7, channels, 3, dtype=pool_dtype, used={0}).to(device)
    table, pool, budget = SegmentTable.build(SEGMENTS, 7, device), states.clone(), conv_budget(dtype, pool_dtype)
    gates = (a, b, a_log, dt_bias)
    mixed, g, beta = ckpt_ops.conv_gates_prefill(x, weight, None, *gates, pool, table, activation="silu")
    expected, expected_pool = causal_conv1d_prefill_reference(x, weight, None, states, table, activation="silu")
    within(mixed, expected, budget, "outputs")
    written = [1, 2, 3, 4, 6]
    assert torch.equal(pool[written], expected_pool[written].to(pool_dtype))
    check_gates(g, beta, gates)

    slots, states = torch.tensor([3, -1, 0, 4, 1], dtype=torch.int32, device=device), pool.clone()
    gates = (a[:5], b[:5], a_log, dt_bias)
    mixed, g, beta = ckpt_ops.conv_gates_decode(x[:5], weight, None, *gates, pool, slots, activation="silu")
    expected, expected_pool = causal_conv1d_decode_reference(x[:5], weight, None, states, slots, activation="silu")
    within(mixed, expected, budget, "decoded outputs")
    assert torch.equal(pool[[3, 0, 4, 1]], expected_pool[[3, 0, 4, 1]].to(pool_dtype))
    check_gates(g, beta, gates)


def check_gates(g: Tensor, beta: Tensor, gates: tuple[Tensor, ...]) -> None:
    a, b, a_log, dt_bias = gates
    decay, strength = gates_reference(a, b, a_log, dt_bias)
    assert ((g.double() / decay - 1).abs() <= gate_budget(a, a_log, dt_bias)).all()
    assert ((beta.double() / strength - 1).abs() <= torch.finfo(b.dtype).eps).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_place_under_load(device: str) -> None:
    """A race within a program, where one thread overwrites what another has yet to read, shows when many programs run:
    histories are copies of tokens, so after many steps in place they must be each row's last three tokens, exactly."""
    rows, channels, steps = (512, 4100, 20) if device == "cuda" else (8, 70, 6)
    x = torch.randn(steps, rows, channels, generator=torch.Generator().manual_seed(1)).half().to(device)
    weight, slots = make_pool(channels, 4).to(device), torch.randperm(rows).int().to(device)
    decoded = torch.zeros(rows, channels, 3, dtype=torch.float16, device=device)
    prefilled = decoded.clone()
    table = SegmentTable.build([Segment(1, source=s, destination=s) for s in slots.tolist()], rows, device)
    for step in range(steps):
        one = ckpt_ops.causal_conv1d_decode(x[step], weight, None, decoded, slots)
        other = ckpt_ops.causal_conv1d_prefill(x[step], weight, None, prefilled, table)
        torch.testing.assert_close(one, other, rtol=2**-9, atol=2**-9)
    expected = x[-3:].permute(1, 2, 0)
    assert torch.equal(decoded[slots.long()], expected)
    assert torch.equal(prefilled[slots.long()], expected)


@pytest.mark.gpu
def test_on_a_device_that_is_not_the_current_one() -> None:
    """Layers spread over several GPUs run on the tensors' device and leave the current one as it was."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = make_delta_rule_inputs(TOKENS, 4, 8, 128, 128, dtype=torch.bfloat16).to(device)
        pool, table = make_pool(7, 8, 128, 128).to(device), SegmentTable.build(SEGMENTS, 7, device)
        with torch.cuda.device(0):
            out = ckpt_ops.two_phase_gdn_prefill(*inputs.tensors(), pool, table)
            assert torch.cuda.current_device() == 0
        results.append((out.cpu(), pool.cpu()))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))

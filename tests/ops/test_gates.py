"""The convolution with the gates beside it: the same convolution to the bit, and gates against fp64, value by value."""

from __future__ import annotations

import pytest
import torch
from ops_harness import Backend, untouched
from torch import Tensor

import ckpt_ops
from ckpt_ops import Segment
from ckpt_ops.reference import gates_reference
from ckpt_ops.testing import gate_budget, make_pool

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CHANNELS, SLOTS = 24, torch.tensor([4, -1, 0, 2, -1], dtype=torch.int32)


def gate_inputs(rows: int, heads: int, dtype: torch.dtype = torch.float32, reach: float = 80.0) -> tuple[Tensor, ...]:
    """a, b, a_log, dt_bias. ``a`` from -reach to reach and beyond 20, where softplus is its argument; ``|b|`` below 9,
    where fp16 still has normal numbers for its sigmoid."""
    a = (torch.linspace(-reach, reach, rows * heads).view(rows, heads)).to(dtype)
    b = (make_pool(rows, heads, seed=7) * 6).clamp(-9, 9).to(dtype)
    return a, b, make_pool(heads, seed=8) * 4, make_pool(heads, seed=9)


def check_gates(g: Tensor, beta: Tensor, inputs: tuple[Tensor, ...]) -> None:
    a, b, a_log, dt_bias = inputs
    expected, strength = gates_reference(a, b, a_log, dt_bias)
    assert (g.dtype, beta.dtype) == (torch.float32, b.dtype)
    assert g.is_contiguous() and beta.is_contiguous()
    g_error = (g.cpu().double() / expected - 1).abs() / gate_budget(a, a_log, dt_bias)
    # As in gate_budget: b's product before the exponential, four roundoffs for each of three steps; then beta's dtype.
    beta_budget = (b.double().abs() + 12) * 2.0**-24 + ROUNDING[b.dtype]
    beta_error = (beta.cpu().double() / strength - 1).abs() / beta_budget
    print(f"of their budgets: g {g_error.max():.2f}, beta {beta_error.max():.2f}")
    assert g_error.max() <= 1, f"g misses its budget by a factor of {g_error.max()}"
    assert beta_error.max() <= 1, f"beta misses its budget by a factor of {beta_error.max()}"


@pytest.mark.parametrize("heads", [1, 6, 48])
@DTYPES
def test_prefill(backend: Backend, dtype: torch.dtype, heads: int) -> None:
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    segments = [Segment(17, source=0, destination=1), Segment(9, parent=0, destination=2), Segment(2, parent=0)]
    tokens = sum(segment.length for segment in segments)
    x, weight = make_pool(tokens, CHANNELS, dtype=dtype, seed=5), make_pool(CHANNELS, 4, seed=2)
    states = make_pool(3, CHANNELS, 3, dtype=dtype, used={0})
    table, inputs = backend.table(segments, 3), gate_inputs(tokens, heads, dtype)
    (mixed, g, beta), after = backend.conv_gates((x, weight, None, *inputs), states, table, "silu")
    expected, expected_pool = backend.conv(x, weight, None, states, table, "silu")
    assert torch.equal(mixed, expected)
    assert torch.equal(after.nan_to_num(7e4), expected_pool.nan_to_num(7e4))
    check_gates(g, beta, inputs)


@pytest.mark.parametrize("heads", [1, 6, 48])
@DTYPES
def test_decode(backend: Backend, dtype: torch.dtype, heads: int) -> None:
    """Rows of slot -1 write zeros to mixed and nothing to the pool; their gates are like all others."""
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    channels = 300  # more than one program a row
    x, weight, bias = make_pool(5, channels, dtype=dtype), make_pool(channels, 4, seed=2), make_pool(channels, seed=3)
    states, inputs = make_pool(6, channels, 3, dtype=dtype, used={4, 0, 2}), gate_inputs(5, heads, dtype)
    (mixed, g, beta), after = backend.conv_gates_decode((x, weight, bias, *inputs), states, SLOTS, "silu")
    expected, expected_pool = backend.conv_decode(x, weight, bias, states, SLOTS, "silu")
    assert torch.equal(mixed, expected)
    assert torch.equal(after.nan_to_num(7e4), expected_pool.nan_to_num(7e4))
    untouched(after, states, [4, 0, 2])
    assert not mixed[[1, 4]].any()
    check_gates(g, beta, inputs)


def test_independent_of_the_batch(backend: Backend) -> None:
    """Each token's gates alone, in a prefill and in a decode step, are to the bit those of the whole batch."""
    tokens, heads, weight = 21, 5, make_pool(CHANNELS, 4, seed=2)
    x, states = make_pool(tokens, CHANNELS, seed=5), make_pool(2, CHANNELS, 3)
    a, b, *parameters = gate_inputs(tokens, heads)
    table = backend.table([Segment(tokens)], 2)
    (_, g, beta), _ = backend.conv_gates((x, weight, None, a, b, *parameters), states, table)
    for start, stop in ((0, 1), (3, 4), (7, 20)):
        rows = [part[start:stop].clone() for part in (x, a, b)]
        call = (rows[0], weight, None, *rows[1:], *parameters)
        for results, _ in (
            backend.conv_gates(call, states, backend.table([Segment(stop - start)], 2)),
            backend.conv_gates_decode(call, states, torch.full((stop - start,), -1, dtype=torch.int32)),
        ):
            assert torch.equal(results[1], g[start:stop])
            assert torch.equal(results[2], beta[start:stop])


def test_views_of_one_projection(backend: Backend) -> None:
    """a and b as halves of one tensor, parameters as columns of another, each also the other way round in memory."""
    tokens, heads, weight = 17, 3, make_pool(CHANNELS, 4, seed=2)
    x, states, table = make_pool(tokens, CHANNELS, seed=5), make_pool(1, CHANNELS, 3), backend.table([Segment(17)], 1)
    a, b, a_log, dt_bias = gate_inputs(tokens, heads)
    expected, _ = backend.conv_gates((x, weight, None, a, b, a_log, dt_bias), states, table)
    both, parameters = torch.cat([b, a], 1), torch.stack([a_log, dt_bias], 1)
    views = (both[:, heads:], both[:, :heads], parameters[:, 0], parameters[:, 1])
    turned = (a.t().contiguous().t(), b.t().contiguous().t(), a_log, dt_bias)
    for call in (views, turned):
        results, _ = backend.conv_gates((x, weight, None, *call), states, table)
        assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))


def test_extreme_values(backend: Backend) -> None:
    """Infinite and NaN projections stay where they are, and are torch's own limits."""
    values = torch.tensor([-torch.inf, -1e4, 0.0, 19.9, 20.1, 1e4, torch.inf, torch.nan])
    a = torch.stack([values, torch.zeros(8)], 1)
    parameters = torch.tensor([0.5, -60.0]), torch.zeros(2)
    x, weight, states = make_pool(8, CHANNELS), make_pool(CHANNELS, 4), make_pool(1, CHANNELS, 3)
    (_, g, beta), _ = backend.conv_gates((x, weight, None, a, a, *parameters), states, backend.table([Segment(8)], 1))
    expected = -parameters[0].exp() * torch.nn.functional.softplus(a)
    torch.testing.assert_close(g.cpu(), expected, rtol=2**-17, atol=0, equal_nan=True)  # 2 * 60 roundoffs of a_log
    torch.testing.assert_close(beta.cpu(), a.sigmoid(), rtol=2**-20, atol=0, equal_nan=True)
    assert g[1:-1].cpu().max() <= 0


def test_no_tokens_and_no_segments(backend: Backend) -> None:
    weight, states = make_pool(CHANNELS, 4), make_pool(2, CHANNELS, 3)
    call = (torch.zeros(0, CHANNELS), weight, None, *gate_inputs(0, 3))
    none = torch.zeros(0, dtype=torch.int32)
    for (mixed, g, beta), after in (
        backend.conv_gates(call, states, backend.table([], 2)),
        backend.conv_gates_decode(call, states, none),
    ):
        assert (mixed.shape, g.shape, beta.shape) == ((0, CHANNELS), (0, 3), (0, 3))
        assert torch.equal(after.cpu(), states)
    _, after = backend.conv_gates(call, states, backend.table([Segment(0, source=0, destination=1)], 2))
    assert torch.equal(after.cpu(), states[[0, 0]])


@DTYPES
def test_as_torch_computes_them(dtype: torch.dtype) -> None:
    """On a CPU, torch's own softplus and sigmoid, which differ among themselves by a rounding from batch to batch."""
    x, weight, states = make_pool(50, 8, dtype=dtype), make_pool(8, 4), make_pool(50, 8, 3, dtype=dtype)
    a, b, a_log, dt_bias = gate_inputs(50, 32, dtype)
    slots = torch.arange(50, dtype=torch.int32)
    _, g, beta = ckpt_ops.conv_gates_decode(x, weight, None, a, b, a_log, dt_bias, states, slots)
    expected = -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    torch.testing.assert_close(g, expected, rtol=2**-22, atol=0)
    torch.testing.assert_close(
        beta, b.sigmoid(), rtol=2**-22 if dtype == torch.float32 else torch.finfo(dtype).eps, atol=0
    )


def test_beta_of_fp64_on_the_cpu() -> None:
    """g is fp32 whatever a is, beta keeps b's dtype and its precision."""
    x, weight, states = (make_pool(*shape, dtype=torch.float64) for shape in ((4, 8), (8, 4), (4, 8, 3)))
    inputs = gate_inputs(4, 3, torch.float64)
    _, g, beta = ckpt_ops.conv_gates_decode(x, weight, None, *inputs, states, torch.arange(4, dtype=torch.int32))
    assert g.dtype == torch.float32
    torch.testing.assert_close(beta, inputs[1].sigmoid(), rtol=1e-15, atol=0)

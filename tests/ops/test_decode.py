"""One token a row: against fp64, in place, unused rows skipped, and equal to prefill of one token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops_harness import Backend, untouched, within

from ckpt_ops import Segment
from ckpt_ops.reference import causal_conv1d_decode_reference, gdn_decode_reference
from ckpt_ops.testing import conv_budget, delta_rule_budget, make_delta_rule_inputs, make_pool

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SLOTS = torch.tensor([4, -1, 0, 2, -1], dtype=torch.int32)
WRITTEN = [4, 0, 2]


@pytest.mark.parametrize(
    "dims", [(2, 2, 64, 64), (2, 4, 128, 128), (1, 4, 96, 64), (1, 2, 256, 48), (1, 1, 5, 3)], ids=str
)
@DTYPES
def test_gdn_decode(backend: Backend, dtype: torch.dtype, dims: tuple[int, int, int, int]) -> None:
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    heads_k, heads_v, dim_k, dim_v = dims
    inputs = make_delta_rule_inputs(5, heads_k, heads_v, dim_k, dim_v, dtype=dtype)
    pool = make_pool(6, heads_v, dim_k, dim_v, used=set(WRITTEN))
    out, after = backend.decode(inputs, pool, SLOTS)
    expected, states = gdn_decode_reference(*inputs.tensors(), pool, SLOTS)
    budget = delta_rule_budget(dtype, rounds_operands=False)
    within(out, expected, budget, "outputs")
    within(after[WRITTEN], states[WRITTEN], delta_rule_budget(torch.float32, rounds_operands=False), "states")
    untouched(after, pool, WRITTEN)
    assert not out[[1, 4]].any()


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gdn_decode_pool_of_half_precision(backend: Backend, pool_dtype: torch.dtype) -> None:
    if not backend.supports(pool_dtype):
        pytest.skip("not a dtype of this backend")
    inputs = make_delta_rule_inputs(5, 1, 2, 32, 32)
    pool = make_pool(6, 2, 32, 32, dtype=pool_dtype)
    out, after = backend.decode(inputs, pool, SLOTS)
    expected, states = gdn_decode_reference(*inputs.tensors(), pool, SLOTS)
    budget = delta_rule_budget(torch.float32, pool_dtype, rounds_operands=False)
    within(out, expected, budget, "outputs")
    within(after[WRITTEN], states[WRITTEN], budget, "states")


def test_gdn_decode_independent_of_the_batch(backend: Backend) -> None:
    inputs, pool = make_delta_rule_inputs(5, 1, 2, 33, 17), make_pool(6, 2, 33, 17)
    out, after = backend.decode(inputs, pool, SLOTS)
    for row, slot in enumerate(SLOTS.tolist()):
        alone, final = backend.decode(inputs.rows(row, row + 1), pool, SLOTS[row : row + 1])
        assert torch.equal(alone[0], out[row])
        assert slot < 0 or torch.equal(final[slot], after[slot])


def test_gdn_decode_continues_a_prefill(backend: Backend) -> None:
    """Prefill of 20, then 3 decode steps, against one reference pass over 23."""
    inputs, pool = make_delta_rule_inputs(23, 1, 2, 32, 32), make_pool(1, 2, 32, 32)
    _, states = backend.prefill(inputs.rows(0, 20), pool, backend.table([Segment(20, destination=0)], 1))
    outs = []
    for t in range(20, 23):
        out, states = backend.decode(inputs.rows(t, t + 1), states, torch.zeros(1, dtype=torch.int32))
        outs.append(out)
    whole, after = backend.check(inputs, pool, [Segment(23, destination=0)])
    budget = 2 * delta_rule_budget(torch.float32, rounds_operands=False)
    within(torch.cat(outs), whole[20:], budget, "outputs")
    within(states, after, budget, "states")


def test_gdn_decode_extreme_gates(backend: Backend) -> None:
    inputs, pool = make_delta_rule_inputs(2, 1, 1, 16, 16), make_pool(2, 1, 16, 16)
    inputs = replace(inputs, g=torch.tensor([[-torch.inf], [-200.0]]))
    out, after = backend.decode(inputs, pool, torch.tensor([0, 1], dtype=torch.int32))
    assert out.isfinite().all()
    assert after.isfinite().all()


def test_decode_of_an_empty_batch(backend: Backend) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    pool = make_pool(2, 2, 16, 16)
    out, after = backend.decode(make_delta_rule_inputs(0, 1, 2, 16, 16), pool, none)
    assert out.shape == (0, 2, 16)
    assert torch.equal(after.cpu(), pool)
    states = make_pool(2, 8, 3)
    out, after = backend.conv_decode(torch.zeros(0, 8), torch.ones(8, 4), None, states, none)
    assert out.shape == (0, 8)
    assert torch.equal(after.cpu(), states)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("channels", "width"), [(64, 4), (33, 2), (300, 3), (40, 8)])
@DTYPES
def test_conv_decode(backend: Backend, dtype: torch.dtype, channels: int, width: int, activation: str | None) -> None:
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    x, weight, bias = (
        make_pool(5, channels, dtype=dtype),
        make_pool(channels, width, seed=2),
        make_pool(channels, seed=3),
    )
    states = make_pool(6, channels, width - 1, dtype=dtype, seed=4, used=set(WRITTEN))
    out, after = backend.conv_decode(x, weight, bias, states, SLOTS, activation)
    expected, final = causal_conv1d_decode_reference(x, weight, bias, states, SLOTS, activation=activation)
    within(out, expected, conv_budget(dtype, dtype), "outputs")
    assert torch.equal(after[WRITTEN].cpu(), final[WRITTEN].to(dtype))
    untouched(after, states, WRITTEN)
    assert not out[[1, 4]].any()

"""The packed prefill against the fp64 recurrence, and what must be equal to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops_harness import INTERPRETING, Backend, forest, mixed_lengths, used_slots, within

from ckpt_ops import Segment, SegmentTable
from ckpt_ops.reference import gdn_prefill_reference
from ckpt_ops.testing import delta_rule_budget, make_delta_rule_inputs, make_pool, relative_error

HALF = torch.float16


def _tokens(segments: list[Segment]) -> int:
    return sum(segment.length for segment in segments)


@pytest.mark.parametrize(
    ("heads_k", "heads_v", "dim_k", "dim_v"),
    [(2, 2, 64, 64), (2, 4, 128, 128), (1, 4, 96, 64), (2, 4, 40, 80), (1, 2, 256, 256), (1, 1, 5, 3)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mixed_lengths(
    backend: Backend, dtype: torch.dtype, heads_k: int, heads_v: int, dim_k: int, dim_v: int
) -> None:
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    if backend.small and dim_k >= 96:  # heads are independent, and smaller ones have shown how they are grouped
        heads_k, heads_v = 1, min(2, heads_v // heads_k)
    segments = mixed_lengths(backend.small or dim_k > 128)
    inputs = make_delta_rule_inputs(_tokens(segments), heads_k, heads_v, dim_k, dim_v, dtype=dtype)
    pool = make_pool(2 * len(segments), heads_v, dim_k, dim_v, used=used_slots(segments))
    backend.check(inputs, pool, segments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forest(backend: Backend, dtype: torch.dtype) -> None:
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    segments = forest(backend.small)
    inputs = make_delta_rule_inputs(_tokens(segments), 1, 2, 64, 32, dtype=dtype)
    pool = make_pool(15, 2, 64, 32, used=used_slots(segments))
    backend.check(inputs, pool, segments)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pool_of_half_precision(backend: Backend, pool_dtype: torch.dtype) -> None:
    if not backend.supports(pool_dtype):
        pytest.skip("not a dtype of this backend")
    segments = mixed_lengths(small=True)
    inputs = make_delta_rule_inputs(_tokens(segments), 1, 2, 32, 32)
    backend.check(inputs, make_pool(14, 2, 32, 32, dtype=pool_dtype, used=used_slots(segments)), segments)


@pytest.mark.parametrize("gate", [None, 0.0, -5.0, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_correlated_keys_and_extreme_gates(backend: Backend, gate: float | None, dtype: torch.dtype) -> None:
    """-5 a token: exp of a negated sum would overflow within a chunk. 0: the plain delta rule."""
    segments = [Segment(130 if not backend.small else 70, source=0, destination=1), Segment(64, destination=2)]
    inputs = make_delta_rule_inputs(_tokens(segments), 1, 2, 64, 32, dtype=dtype, correlated=True, gate=gate)
    out, _ = backend.check(inputs, make_pool(3, 2, 64, 32, used={0}), segments, hard=True)
    assert out.isfinite().all()


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_strong_gates_on_some_tokens(backend: Backend, dtype: torch.dtype, correlated: bool) -> None:
    """Cancellation: sums of -100 on 30 % of the tokens, of which only differences of neighbours of about -1 matter."""
    segments = [Segment(70 if backend.small else 130, source=0, destination=1), Segment(64, destination=2)]
    inputs = make_delta_rule_inputs(_tokens(segments), 1, 2, 64, 32, dtype=dtype, correlated=correlated)
    strong = torch.rand(inputs.g.shape, generator=torch.Generator().manual_seed(3)) < 0.3
    inputs = replace(inputs, g=torch.where(strong, -100.0, inputs.g))
    out, _ = backend.check(inputs, make_pool(3, 2, 64, 32, used={0}), segments)
    assert out.isfinite().all()


def test_zero_beta_writes_nothing(backend: Backend) -> None:
    inputs = make_delta_rule_inputs(70, 1, 1, 32, 32, gate=0.0)
    inputs = replace(inputs, beta=torch.zeros_like(inputs.beta))
    pool = make_pool(2, 1, 32, 32)
    _, after = backend.prefill(inputs, pool, backend.table([Segment(70, source=0, destination=1)], 2))
    assert torch.equal(after[1].cpu(), pool[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cut_is_no_worse_than_uncut(backend: Backend, dtype: torch.dtype) -> None:
    """Invariant 3, over several cuts: the mean error of the cut runs against that of one uncut pass.

    The state passes through its fp32 slot unrounded, so a cut moves the chunk grid and nothing else; each single error
    is random, so the bound on one is half as large again.
    """
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    total = 80 if backend.small else 300
    inputs = make_delta_rule_inputs(total, 1, 2, 64, 64, dtype=dtype, correlated=True)
    pool = make_pool(2, 2, 64, 64)
    whole = [Segment(total, destination=0)]
    expected, states = gdn_prefill_reference(*inputs.tensors(), pool, SegmentTable.build(whole, 2, "cpu"))
    out, after = backend.prefill(inputs, pool, backend.table(whole, 2))
    uncut = relative_error(out, expected), relative_error(after[0], states[0])
    cuts = (1, 31, total - 1) if backend.small else (1, 63, 64, 65, 127, 200, 299)
    errors = []
    for cut in cuts:
        halves = [Segment(cut, destination=1), Segment(total - cut, parent=0, destination=0)]
        out, after = backend.prefill(inputs, pool, backend.table(halves, 2))
        errors.append((relative_error(out, expected), relative_error(after[0], states[0])))
        print(f"cut {cut}: {errors[-1]}, uncut {uncut}")
    for kind in (0, 1):
        assert max(error[kind] for error in errors) <= 1.5 * uncut[kind]


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hit_equals_miss(backend: Backend, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Invariant 2: a Consumer beside its Producer, after it, and after it in a fresh pool: equal to the bit."""
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    prefix, suffixes = (17, (5, 33)) if backend.small else (130, (1, 20, 64, 65))
    inputs = make_delta_rule_inputs(prefix + sum(suffixes), 1, 2, 64, 48, dtype=dtype)
    pool = make_pool(8, 2, 64, 48, dtype=pool_dtype)
    together = [Segment(prefix, source=0, destination=1)]
    together += [Segment(length, parent=0, destination=2 + i) for i, length in enumerate(suffixes)]
    out, after = backend.prefill(inputs, pool, backend.table(together, 8))

    produced, saved = backend.prefill_one_phase(inputs.rows(0, prefix), pool, backend.table(together[:1], 8))
    assert torch.equal(produced, out[:prefix])
    assert torch.equal(saved[1], after[1])
    fresh = torch.full_like(saved, torch.nan)
    fresh[7] = saved[1]
    start = prefix
    for i, length in enumerate(suffixes):
        alone = backend.table([Segment(length, source=7, destination=7)], 8)
        consumed, final = backend.prefill_one_phase(inputs.rows(start, start + length), fresh, alone)
        assert torch.equal(consumed, out[start : start + length])
        assert torch.equal(final[7], after[2 + i])
        start += length


@pytest.mark.parametrize(
    "dims", [(1, 2, 64, 64), (1, 2, 7, 5)] if INTERPRETING else [(2, 4, 64, 64), (1, 2, 7, 5), (1, 4, 32, 24)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_independent_of_the_batch(backend: Backend, dtype: torch.dtype, dims: tuple[int, int, int, int]) -> None:
    """Invariant 2: each sequence alone gives what it gave in the batch, to the bit."""
    segments = mixed_lengths(backend.small)
    heads_k, heads_v, dim_k, dim_v = dims
    inputs = make_delta_rule_inputs(_tokens(segments), heads_k, heads_v, dim_k, dim_v, dtype=dtype)
    pool = make_pool(2 * len(segments), heads_v, dim_k, dim_v)
    out, after = backend.prefill(inputs, pool, backend.table(segments, pool.shape[0]))
    start = 0
    for segment in segments:
        part = inputs.rows(start, start + segment.length)
        alone, final = backend.prefill_one_phase(part, pool, backend.table([segment], pool.shape[0]))
        assert torch.equal(alone, out[start : start + segment.length])
        assert torch.equal(final[segment.destination], after[segment.destination])
        start += segment.length


def test_slots_in_place_and_reused(backend: Backend) -> None:
    """A slot may be source and destination of one segment; a new owner of a slot starts from zero, whatever it held."""
    inputs = make_delta_rule_inputs(40, 1, 2, 32, 32)
    pool = make_pool(3, 2, 32, 32, used={0})
    segments = [Segment(20, source=0, destination=0), Segment(20, destination=1)]
    backend.check(inputs, pool, segments)


def test_views_of_one_projection(backend: Backend) -> None:
    """q, k, v as slices of one tensor, gates as slices of another, as a model makes them."""
    segments = [Segment(33, source=0, destination=1), Segment(16, parent=0, destination=2)]
    tokens, heads_k, heads_v, dim = _tokens(segments), 1, 2, 32
    dense = make_delta_rule_inputs(tokens, heads_k, heads_v, dim, dim)
    mixed = torch.cat([x.flatten(1) for x in (dense.q, dense.k, dense.v)], 1)
    gates = torch.cat([dense.beta, dense.g], 1)
    q, k, v = mixed.split([heads_k * dim, heads_k * dim, heads_v * dim], 1)
    views = replace(
        dense,
        q=q.unflatten(1, (heads_k, dim)),
        k=k.unflatten(1, (heads_k, dim)),
        v=v.unflatten(1, (heads_v, dim)),
        beta=gates[:, :heads_v],
        g=gates[:, heads_v:],
    )
    pool = make_pool(3, heads_v, dim, dim)
    table = backend.table(segments, 3)
    for result, expected in zip(backend.prefill(views, pool, table), backend.prefill(dense, pool, table), strict=True):
        assert torch.equal(result, expected)
    strided = replace(dense, q=dense.q.mT.contiguous().mT, g=dense.g.t().contiguous().t())
    assert torch.equal(backend.prefill(strided, pool, table)[0], backend.prefill(dense, pool, table)[0])


def test_no_tokens_and_no_segments(backend: Backend) -> None:
    inputs = make_delta_rule_inputs(0, 1, 2, 32, 32)
    pool = make_pool(4, 2, 32, 32)
    out, after = backend.prefill(inputs, pool, backend.table([], 4))
    assert out.shape == (0, 2, 32)
    assert torch.equal(after.cpu(), pool)
    segments = [Segment(0, source=0, destination=1), Segment(0, destination=2), Segment(0, parent=0, destination=3)]
    _, after = backend.prefill(inputs, pool, backend.table(segments, 4))
    assert torch.equal(after.cpu(), torch.stack([pool[0], pool[0], torch.zeros_like(pool[0]), pool[0]]))


def test_later_calls_of_other_lengths(backend: Backend) -> None:
    """A first call must not fix anything for later ones of another length; the first repeated gives the same bits."""
    pool = make_pool(2, 1, 32, 32)
    results = []
    for length in (7, 64, 33, 7):
        inputs = make_delta_rule_inputs(length, 1, 1, 32, 32)
        results.append(backend.check(inputs, pool, [Segment(length, source=0, destination=1)])[0])
    assert torch.equal(results[0], results[3])


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_scale(backend: Backend, scale: float) -> None:
    inputs = make_delta_rule_inputs(20, 1, 1, 32, 32)
    pool, table = make_pool(1, 1, 32, 32), backend.table([Segment(20)], 1)
    expected, _ = gdn_prefill_reference(
        *inputs.tensors(), pool, SegmentTable.build([Segment(20)], 1, "cpu"), scale=scale
    )
    within(
        backend.prefill(inputs, pool, table, scale)[0],
        expected,
        delta_rule_budget(torch.float32, rounds_operands=backend.rounds_operands),
        "outputs",
    )


def test_fp64_on_the_cpu() -> None:
    """With fp64 inputs the chunk form agrees with the recurrence to fp64, so it is the algebra and not the rounding."""
    from ops_harness import BACKENDS

    segments = forest(small=False)
    inputs = make_delta_rule_inputs(_tokens(segments), 2, 4, 24, 40, dtype=torch.float64, correlated=True)
    BACKENDS["cpu"].check(inputs, make_pool(15, 4, 24, 40, dtype=torch.float64), segments, hard=True)

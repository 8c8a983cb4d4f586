"""The packed convolution against its definition: history through ancestors and slots, in place, views, dtypes."""

from __future__ import annotations

import pytest
import torch
from ops_harness import INTERPRETING, Backend, forest, mixed_lengths, used_slots

from ckpt_ops import Segment
from ckpt_ops.testing import conv_budget, make_pool

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# The interpreter is slow; each width and activation runs there once.
WIDTHS = [(2, None), (4, "silu")] if INTERPRETING else [(w, act) for w in (2, 3, 4, 8) for act in (None, "silu")]


def _tokens(segments: list[Segment]) -> int:
    return sum(segment.length for segment in segments)


def _tokens_of(channels: int, segments: list[Segment], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return make_pool(_tokens(segments), channels, dtype=dtype, seed=5)


@pytest.mark.parametrize(("width", "activation"), WIDTHS, ids=str)
@DTYPES
def test_mixed_lengths(backend: Backend, dtype: torch.dtype, width: int, activation: str | None) -> None:
    if not backend.supports(dtype):
        pytest.skip("not a dtype of this backend")
    segments, channels = mixed_lengths(backend.small), 70
    states = make_pool(2 * len(segments), channels, width - 1, dtype=dtype, used=used_slots(segments))
    weight, bias = make_pool(channels, width, seed=2), make_pool(channels, seed=3)
    budget = conv_budget(dtype, dtype)
    backend.check_conv(_tokens_of(channels, segments, dtype), weight, bias, states, segments, activation, budget)


@pytest.mark.parametrize("width", [8] if INTERPRETING else [2, 4, 8])
def test_history_through_short_ancestors(backend: Backend, width: int) -> None:
    """Ancestors of 0, 1, 2 and 3 tokens: histories come from several of them and from the root's slot."""
    segments = [*forest(backend.small), Segment(1, parent=9, destination=14), Segment(5, parent=11, destination=15)]
    channels = 24
    states = make_pool(16, channels, width - 1, used=used_slots(segments))
    x, weight = _tokens_of(channels, segments), make_pool(channels, width, seed=2)
    backend.check_conv(x, weight, None, states, segments, None, conv_budget(torch.float32, torch.float32))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_in_place(backend: Backend, length: int) -> None:
    """Source and destination the same slot: the old history is read before the new one is written."""
    segments = [Segment(length, source=1, destination=1), Segment(2, source=0, destination=0)]
    channels = 130
    x, weight = _tokens_of(channels, segments), make_pool(channels, 4, seed=2)
    states = make_pool(2, channels, 3)
    backend.check_conv(x, weight, None, states, segments, None, conv_budget(torch.float32, torch.float32))


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@DTYPES
def test_hit_equals_miss(backend: Backend, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Also with a pool narrower than the tokens: history is rounded to the pool's dtype, through a slot or not."""
    if not (backend.supports(dtype) and backend.supports(pool_dtype)):
        pytest.skip("not a dtype of this backend")
    long = 17 if backend.small else 65
    segments = [Segment(2, source=0, destination=1), Segment(3, parent=0, destination=2), Segment(long, parent=0)]
    channels = 40
    x, weight = _tokens_of(channels, segments, dtype), make_pool(channels, 4, seed=2)
    states = make_pool(3, channels, 3, dtype=pool_dtype)
    out, after = backend.conv(x, weight, None, states, backend.table(segments, 3), "silu")
    first, saved = backend.conv(x[:2].clone(), weight, None, states, backend.table(segments[:1], 3), "silu")
    assert torch.equal(first, out[:2])
    assert torch.equal(saved[1], after[1])
    start = 2
    for length in (3, long):
        table = backend.table([Segment(length, source=1, destination=2)], 3)
        alone, final = backend.conv(x[start : start + length].clone(), weight, None, saved, table, "silu")
        assert torch.equal(alone, out[start : start + length])
        assert length != 3 or torch.equal(final[2], after[2])
        start += length


def test_cut_equals_uncut(backend: Backend) -> None:
    channels, total = 24, 20 if backend.small else 70
    x, weight = make_pool(total, channels, seed=5), make_pool(channels, 4, seed=2)
    states = make_pool(2, channels, 3)
    whole, final = backend.conv(x, weight, None, states, backend.table([Segment(total, destination=0)], 2))
    for cut in (1, 3, 16) if backend.small else (1, 2, 3, 64, 69):
        halves = [Segment(cut, destination=1), Segment(total - cut, parent=0, destination=0)]
        out, after = backend.conv(x, weight, None, states, backend.table(halves, 2))
        assert torch.equal(out, whole)
        assert torch.equal(after[0], final[0])


def test_slice_of_a_projection(backend: Backend) -> None:
    segments, channels = [Segment(17, source=0, destination=1), Segment(3, parent=0, destination=2)], 40
    wide = make_pool(_tokens(segments), 100, seed=5)
    weight, states = make_pool(channels, 4, seed=2), make_pool(3, channels, 3)
    table = backend.table(segments, 3)
    view = wide.to(backend.device)[:, 8 : 8 + channels]
    out, after = backend.conv(view, weight, None, states, table, "silu")
    expected, final = backend.conv(view.contiguous(), weight, None, states, table, "silu")
    assert torch.equal(out, expected)
    assert torch.equal(after, final)
    transposed = view.t().contiguous().t()
    assert torch.equal(backend.conv(transposed, weight.t().contiguous().t(), None, states, table, "silu")[0], expected)


def test_no_tokens_and_no_segments(backend: Backend) -> None:
    states, weight = make_pool(3, 8, 3), make_pool(8, 4)
    out, after = backend.conv(torch.zeros(0, 8), weight, None, states, backend.table([], 3))
    assert out.shape == (0, 8)
    assert torch.equal(after.cpu(), states)
    segments = [Segment(0, source=0, destination=1), Segment(0, destination=2)]
    _, after = backend.conv(torch.zeros(0, 8), weight, None, states, backend.table(segments, 3))
    assert torch.equal(after.cpu(), torch.stack([states[0], states[0], torch.zeros(8, 3)]))

"""Offsets beyond 2^31 elements, on pools and projections that are mapped but, but for a few pages, never touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops_harness import Backend
from torch import Tensor

import ckpt_ops
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.testing import make_delta_rule_inputs, make_pool

HEADS_V, DIM, CHANNELS = 2, 64, 128


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Override the package's fixture: filling these pools with NaN would commit their memory."""


def _huge_pool(backend: Backend, *slot_shape: int) -> tuple[Tensor, int]:
    """An fp16 pool whose last three slots lie past 2^31 elements, and the first of these."""
    size = 1
    for length in slot_shape:
        size *= length
    first = -(-(2**31) // size) + 1
    return torch.empty(first + 3, *slot_shape, dtype=torch.float16, device=backend.device), first


def _on_pool(backend: Backend, name: str, tensors: tuple[Tensor, ...], pool: Tensor, *rest: object) -> Tensor:
    """The op in place on ``pool``, which the harness's own helpers would copy."""
    if not backend.direct:
        function: Callable[..., Tensor] = getattr(torch.ops.ckpt_ops, name)
    else:
        from ckpt_ops import launch

        function = getattr(launch, name)
    return function(*tensors, *_flat(pool, rest))


def _flat(pool: Tensor, rest: tuple[object, ...]) -> tuple[object, ...]:
    first, *others = rest
    if isinstance(first, SegmentTable):
        links = (first.cu_seqlens, pool, first.sources, first.destinations, first.parents)
        return (*links, first.phase_offsets) if not others else (*links, *others[1:])
    return (pool, *rest)


def test_prefill_and_decode_in_far_slots(backend: Backend) -> None:
    pool, first = _huge_pool(backend, HEADS_V, DIM, DIM)
    near = make_pool(3, HEADS_V, DIM, DIM, dtype=torch.float16).to(backend.device)
    pool[first:] = near
    inputs = make_delta_rule_inputs(6, 1, HEADS_V, DIM, DIM).to(backend.device)
    far = [Segment(4, source=first, destination=first + 1), Segment(2, parent=0, destination=first + 2)]
    close = [Segment(4, source=0, destination=1), Segment(2, parent=0, destination=2)]
    out = _on_pool(backend, "two_phase_gdn_prefill", inputs.tensors(), pool, backend.table(far, pool.shape[0]))
    expected = _on_pool(backend, "two_phase_gdn_prefill", inputs.tensors(), near, backend.table(close, 3))
    assert torch.equal(out, expected)
    assert torch.equal(pool[first:], near)

    rows = inputs.rows(0, 2)
    slots = torch.tensor([2, 0], dtype=torch.int32, device=backend.device)
    out = _on_pool(backend, "gdn_decode", rows.tensors(), pool, slots + first)
    assert torch.equal(out, _on_pool(backend, "gdn_decode", rows.tensors(), near, slots))
    assert torch.equal(pool[first:], near)


def test_convolution_in_far_slots(backend: Backend) -> None:
    pool, first = _huge_pool(backend, 1024, 3)
    channels = pool.shape[1]
    near = make_pool(3, channels, 3, dtype=torch.float16).to(backend.device)
    pool[first:] = near
    x, weight = make_pool(3, channels).to(backend.device), make_pool(channels, 4).to(backend.device)
    far = backend.table([Segment(1, source=first, destination=first + 1), Segment(2, parent=0)], pool.shape[0])
    close = backend.table([Segment(1, source=0, destination=1), Segment(2, parent=0)], 3)
    call = (x, weight, None)
    out = _on_pool(backend, "causal_conv1d_prefill", call, pool, far, "conv")
    assert torch.equal(out, _on_pool(backend, "causal_conv1d_prefill", call, near, close, "conv"))
    assert torch.equal(pool[first:], near)
    slots = torch.tensor([0, 2], dtype=torch.int32, device=backend.device)
    call = (x[:2], weight, None)
    out = _on_pool(backend, "causal_conv1d_decode", call, pool, slots + first)
    assert torch.equal(out, _on_pool(backend, "causal_conv1d_decode", call, near, slots))
    assert torch.equal(pool[first:], near)
    call = (*call, x[:2, :3], x[:2, 3:6], weight[:3, 0], weight[:3, 1])
    out = _on_pool(backend, "conv_gates_decode", call, pool, slots + first)
    assert torch.equal(out[0], _on_pool(backend, "conv_gates_decode", call, near, slots)[0])
    assert torch.equal(pool[first:], near)


def test_tokens_far_apart(backend: Backend) -> None:
    """Slices of a projection so wide that token 17 lies past 2^31 elements; pages in between are never touched."""
    tokens, width = 18, 2**27
    wide = torch.empty(tokens, width, dtype=torch.float16, device=backend.device)
    dense = make_delta_rule_inputs(tokens, 1, 1, 32, 32, dtype=torch.float16).to(backend.device)
    for i, part in enumerate(dense.tensors()[:3]):
        wide[:, 32 * i : 32 * i + 32] = part[:, 0]
    views = [wide[:, None, 32 * i : 32 * i + 32] for i in range(3)]
    assert views[0].stride(0) * (tokens - 1) > 2**31
    table = backend.table([Segment(tokens, destination=0)], 1)
    results = []
    for q, k, v in (views, dense.tensors()[:3]):
        pool = torch.zeros(1, 1, 32, 32, device=backend.device)
        out = _on_pool(backend, "two_phase_gdn_prefill", (q, k, v, dense.g, dense.beta), pool, table)
        results.append((out, pool))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])

    x, weight = wide[:, :64], make_pool(64, 4).to(backend.device)
    pools = [make_pool(1, 64, 3).to(backend.device) for _ in range(2)]
    out = _on_pool(backend, "causal_conv1d_prefill", (x, weight, None), pools[0], table, "conv")
    near = _on_pool(backend, "causal_conv1d_prefill", (x.contiguous(), weight, None), pools[1], table, "conv")
    assert torch.equal(out, near)
    assert torch.equal(pools[0], pools[1])
    a, b, parameters = wide[:, 64:69], wide[:, 70:75], (weight[:5, 0], weight[:5, 1])
    results = [
        _on_pool(backend, "conv_gates_prefill", (x, weight, None, *gates, *parameters), pools[0].clone(), table, "conv")
        for gates in ((a, b), (a.contiguous(), b.contiguous()))
    ]
    assert all(torch.equal(far, close) for far, close in zip(*results, strict=True))


def test_public_function_takes_a_far_slot() -> None:
    """The host check of slots has no 2^31 limit of its own."""
    table = SegmentTable.build([Segment(0, source=2**30)], 2**30 + 1, "cpu")
    assert table.sources.tolist() == [2**30]
    with pytest.raises(ckpt_ops.ArgumentError, match="segments"):
        SegmentTable.build([Segment(0, source=2**30 + 1)], 2**30 + 1, "cpu")

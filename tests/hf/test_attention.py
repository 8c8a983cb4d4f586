"""Packed attention against a plain softmax over each token's own path, for both ways of computing it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ckpt_hf.attention import packed_attention, varlen_supported
from ckpt_hf.batch import BatchBuilder, path_rows
from ckpt_hf.index import CheckpointIndex, CheckpointLimits
from ckpt_hf.kv import KVRows
from ckpt_hf.plan import StepPlan
from ckpt_hf.pools import KVPools, LayerShapes
from ckpt_hf.requests import Request
from ckpt_hf.scheduler import Scheduler
from ckpt_hf.slots import SlotAllocator

HEAD_DIM, KV_HEADS = 64, 2


def make_scheduler(budget: int) -> Scheduler:
    slots, rows = SlotAllocator(), KVRows()
    limits = CheckpointLimits(None, None, 1, 1, lambda logits: 0)
    return Scheduler(CheckpointIndex(slots, rows, limits), slots, rows, budget)


def run_plans(scheduler: Scheduler, prompts: list[tuple[int, tuple[int, ...]]]) -> Iterator[StepPlan]:
    """Plans that prefill prompts of (length, boundaries) over one shared token stream, then decode twice."""
    stream = list(range(1000))
    requests = []
    for i, (length, boundaries) in enumerate(prompts):
        shared = max(boundaries, default=0)
        ids = stream[:shared] + [5000 + i] * (length - shared)
        keys = tuple(str(ids[:b]).encode() for b in boundaries)
        requests.append(Request(i, ids, boundaries, keys))
        scheduler.add(requests[-1])
    while (plan := scheduler.plan_prefill()) is not None:
        yield plan
        scheduler.commit(plan)
    for _ in range(2):
        for request in requests:
            request.token_ids.append(7)
        plan = scheduler.plan_decode(r.request_id for r in requests)
        yield plan
        scheduler.commit(plan)


def reference(query: torch.Tensor, pools: KVPools, plan: StepPlan, scale: float) -> torch.Tensor:
    """Token by token in fp64: softmax over the rows on the token's path."""
    group = query.shape[1] // KV_HEADS
    outputs, column = [], 0
    for piece in plan.pieces:
        rows = path_rows(piece.kv)
        for t in range(piece.length):
            seen = rows[: len(rows) - (piece.length - 1 - t)]
            k = pools.keys[0][seen].double().repeat_interleave(group, dim=1)
            v = pools.values[0][seen].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", query[column].double(), k) * scale
            outputs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
            column += 1
    return torch.stack(outputs)


PROMPTS = {
    "one anchor": [(70, (64,)), (65, (64,)), (100, (64,)), (64, (64,))],
    "no marker": [(5, ()), (1, ()), (130, ())],
    "mixed": [(30, ()), (70, (64,)), (90, (30, 64, 80)), (31, (30,)), (12, ())],
    "prefix of one token": [(2, (1,)), (9, (1,)), (1, ())],
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("budget", [16384, 64])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)
def test_packed_attention_equals_softmax_over_each_path(
    name: str, budget: int, group: int, device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)
    place = torch.device(device)
    pools = KVPools(LayerShapes({}, {}, {0: (KV_HEADS, HEAD_DIM)}), dtype, place)
    builder = BatchBuilder(place, varlen_supported(place, dtype, HEAD_DIM))
    assert builder.varlen == (dtype != torch.float32)
    # One rounding of the inputs' products to the dtype; float32 sums over at most 150 rows.
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    scheduler = make_scheduler(budget)
    for plan in run_plans(scheduler, PROMPTS[name]):
        pools.reserve(scheduler.kv_rows.high_water)
        if not plan.num_tokens:
            continue
        batch = builder.build(plan, scheduler.slots.high_water)
        shape = (plan.num_tokens, KV_HEADS, HEAD_DIM)
        keys, values = (torch.randn(shape, generator=generator).to(place, dtype) for _ in range(2))
        query = torch.randn((shape[0], KV_HEADS * group, HEAD_DIM), generator=generator).to(place, dtype)
        pools.write(0, batch.attention.write_rows, keys, values)
        actual = packed_attention(query, pools, 0, batch.attention, HEAD_DIM**-0.5)
        expected = reference(query, pools, plan, HEAD_DIM**-0.5)
        error = ((actual.double() - expected).norm() / expected.norm()).item()
        assert error <= tolerance, f"{error:.2e} > {tolerance:.2e}"


def test_a_contiguous_prefix_is_read_in_place() -> None:
    scheduler = make_scheduler(16384)
    builder = BatchBuilder(torch.device("cpu"), varlen=True)
    plans = run_plans(scheduler, [(70, (64,)), (80, (64,)), (65, (64,))])
    attention = builder.build(next(plans), scheduler.slots.high_water).attention
    assert attention.prefix is not None
    assert attention.prefix.rows == slice(0, 64)
    assert attention.prefix.cu_queries.tolist() == [0, 6 + 16 + 1]
    assert attention.own is not None
    assert attention.own.rows is None

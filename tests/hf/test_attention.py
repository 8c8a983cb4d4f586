"""Packed attention against a plain softmax over each token's own path, for both ways of computing it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ckpt_hf.attention import packed_attention, varlen_supported
from ckpt_hf.batch import BatchBuilder, decode_pieces, path_rows
from ckpt_hf.index import CheckpointIndex, CheckpointLimits
from ckpt_hf.kv import KVRows
from ckpt_hf.plan import StepPlan
from ckpt_hf.pools import KVPools, LayerShapes
from ckpt_hf.requests import Request, RequestStatus
from ckpt_hf.scheduler import Scheduler
from ckpt_hf.slots import SlotAllocator

HEAD_DIM, KV_HEADS = 64, 2


def make_scheduler(budget: int) -> Scheduler:
    slots, rows = SlotAllocator(), KVRows()
    limits = CheckpointLimits(None, None, 1, 1, lambda logits: 0)
    return Scheduler(CheckpointIndex(slots, rows, limits), slots, rows, budget)


def run_plans(scheduler: Scheduler, prompts: list[tuple[int, tuple[int, ...]]]) -> Iterator[StepPlan]:
    """Plans that prefill prompts of (length, boundaries) over one shared token stream and decode each twice.

    With a small budget the first prompts decode while the last ones are computed.
    """
    stream = list(range(1000))
    requests = []
    for i, (length, boundaries) in enumerate(prompts):
        shared = max(boundaries, default=0)
        ids = stream[:shared] + [5000 + i] * (length - shared)
        keys = tuple(str(ids[:b]).encode() for b in boundaries)
        requests.append(Request(i, ids, boundaries, keys))
        scheduler.add(requests[-1])
    while (plan := scheduler.plan_step()) is not None:
        yield plan
        scheduler.commit(plan)
        for request in requests:
            if request.status is RequestStatus.DECODE and request.position == len(request.token_ids):
                if len(request.token_ids) < request.prompt_tokens + 2:
                    request.token_ids.append(7)
                else:
                    scheduler.finish(request)


def reference(query: torch.Tensor, pools: KVPools, plan: StepPlan, scale: float) -> torch.Tensor:
    """Token by token in fp64: softmax over the rows on the token's path."""
    group = query.shape[1] // KV_HEADS
    outputs, column = [], 0
    for piece in (*plan.pieces, *decode_pieces(plan)):
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
@pytest.mark.parametrize("budget", [16384, 64, 80])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("row_table", [False, True])
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
    name: str, budget: int, group: int, row_table: bool, device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)
    place = torch.device(device)
    pools = KVPools(LayerShapes({}, {}, {0: (KV_HEADS, HEAD_DIM)}), dtype, place)
    if device == "cuda" and not row_table:
        pytest.skip("decode tokens always go through the table on a GPU")
    builder = BatchBuilder(place, varlen_supported(place, dtype, HEAD_DIM), row_table)
    assert builder.varlen == (dtype != torch.float32)
    # One rounding of the inputs' products to the dtype; float32 sums over at most 150 rows.
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    scheduler = make_scheduler(budget)
    mixed = 0
    for plan in run_plans(scheduler, PROMPTS[name]):
        mixed += bool(plan.pieces and plan.decodes)
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
    assert mixed or (name, budget) != ("mixed", 80)


def test_a_contiguous_prefix_is_read_in_place() -> None:
    scheduler = make_scheduler(16384)
    builder = BatchBuilder(torch.device("cpu"), varlen=True)
    plans = run_plans(scheduler, [(70, (64,)), (80, (64,)), (65, (64,))])
    part = builder.build(next(plans), scheduler.slots.high_water).attention.parts[0]
    assert part.prefix is not None
    assert part.prefix.rows == slice(0, 64)
    assert part.prefix.cu_queries.tolist() == [0, 6 + 16 + 1]
    assert part.own is not None
    assert part.own.rows is None

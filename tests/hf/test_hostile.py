"""Callers that interrupt, nest, move, replace and misuse."""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import ckpt_hf
from ckpt_hf.index import CheckpointIndex, CheckpointLimits
from ckpt_hf.kv import KVRows, KVSegment
from ckpt_hf.slots import SlotAllocator

from .models import (
    alone,
    assert_no_leaks,
    build_model,
    generate,
    new_tokens,
    patched_model,
    plain_model,
    shared_prompts,
)

ROWS = shared_prompts(20, [3, 5, 7])
POSITIONS = [[20]] * 3


def answers(model: Any, rows: list[list[int]] = ROWS, **kwargs: Any) -> list[list[int]]:
    return new_tokens(generate(model, rows, checkpoint_positions=[[20]] * len(rows), **kwargs), rows)


class CallingStreamer:
    """Calls a function at its n-th ``put``."""

    def __init__(self, at: int, call: Any) -> None:
        self.at, self.call, self.puts = at, call, 0

    def put(self, value: torch.Tensor) -> None:
        if self.puts == self.at:
            self.call()
        self.puts += 1

    def end(self) -> None:
        pass


class CallingProcessor(LogitsProcessor):
    """Calls a function at every step."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.call()
        return scores


def test_a_parameter_replaced_by_one_at_the_same_address_is_seen() -> None:
    plain = build_model()
    with patched_model() as model:
        for _ in range(4):
            assert answers(model) == alone(plain, ROWS)
            for changed in (model, plain):
                layer = changed.model.layers[0].linear_attn.in_proj_qkv
                for _ in range(2):  # the second one often gets the address that the first one left
                    layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.05)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_streamer_may_call_generate(at: int) -> None:
    other = shared_prompts(20, [2, 6], seed=5)
    inner: list[list[list[int]]] = []
    with patched_model() as model:
        streamer = CallingStreamer(at, lambda: inner.append(answers(model, other)))
        assert answers(model, ROWS[:1], streamer=streamer) == alone(plain_model(), ROWS[:1])
    assert inner == [alone(plain_model(), other)]


def test_generate_within_the_forward_is_refused() -> None:
    with patched_model() as model:
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: answers(model))
        with pytest.raises(ckpt_hf.CheckpointRuntimeError, match="cannot run the model within its own forward"):
            answers(model)
        hook.remove()
        assert_no_leaks(model)
        assert answers(model) == alone(plain_model(), ROWS)


def test_unpatch_and_a_new_dtype_within_a_call_are_refused() -> None:
    with patched_model() as model:
        with pytest.raises(ckpt_hf.CheckpointRuntimeError, match="cannot unpatch within a generate call"):
            answers(model, logits_processor=[CallingProcessor(lambda: ckpt_hf.unpatch(model))])
        assert answers(model) == alone(plain_model(), ROWS)

        def change() -> None:
            model.to(torch.bfloat16)
            answers(model)

        with pytest.raises(ckpt_hf.CheckpointRuntimeError, match="change its dtype within a generate call"):
            answers(model, logits_processor=[CallingProcessor(change)])


def interrupted(model: Any, at: int) -> int:
    """Run a call that is interrupted at its line ``at`` in this package; the number of lines that it ran."""
    lines = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == at:
            raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, *_: Any) -> Any:
        name = frame.f_code.co_filename.rpartition("/")[2]
        return local if name in ("scheduler.py", "draft.py", "kv.py", "slots.py", "index.py", "pools.py") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        answers(model)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return lines


def test_an_interrupt_anywhere_in_the_bookkeeping_harms_no_later_call() -> None:
    expected = alone(plain_model(), ROWS)
    with patched_model() as model:
        total = interrupted(model, -1)
    for at in range(1, total, 37):
        with patched_model(verify=False) as model:
            interrupted(model, at)
            assert answers(model) == expected, at


def test_autocast_gives_what_it_gives_without_checkpoints() -> None:
    with patched_model() as model:
        with torch.autocast("cpu", torch.bfloat16):
            expected = generate(plain_model(), ROWS).tolist()
            with pytest.warns(ckpt_hf.CheckpointWarning, match="autocast is on"):
                assert generate(model, ROWS, checkpoint_positions=POSITIONS).tolist() == expected
        assert answers(model) == alone(plain_model(), ROWS)


def test_patching_works_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model = ckpt_hf.patch(build_model())
    assert answers(model) == alone(plain_model(), ROWS)


def test_patching_keeps_the_mode_of_every_module() -> None:
    model = build_model()
    model.model.layers[1].train()
    modes = [module.training for module in model.modules()]
    ckpt_hf.patch(model)
    assert [module.training for module in model.modules()] == modes


def test_statistics_are_a_copy() -> None:
    with patched_model() as model:
        before = ckpt_hf.stats(model)
        answers(model)
        assert (before.calls, ckpt_hf.stats(model).calls) == (0, 1)


def test_a_limit_on_bytes_holds_quickly_for_a_long_chain_of_checkpoints() -> None:
    slots, rows = SlotAllocator(), KVRows()
    index = CheckpointIndex(slots, rows, CheckpointLimits(None, 1500, 2, 1, lambda _: 0))
    segment: KVSegment | None = None
    for number in range(1500):
        checkpoint = index.reserve(number.to_bytes(4, "little"), (number,), 0, False)
        assert checkpoint is not None
        checkpoint.slot, checkpoint.kv = slots.acquire(checkpoint.key), rows.new_segment(segment)
        segment = checkpoint.kv
        rows.extend(segment, 1)
        index.publish(checkpoint)
    start = time.perf_counter()
    index.enforce_limits()
    assert time.perf_counter() - start < 10  # a minute if every path were walked to its root
    # The last one holds the keys and values of the whole chain, so none can stay.
    assert (len(index), index.bytes_used()) == (0, 0)

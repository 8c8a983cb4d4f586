"""Twenty thousand requests through one engine: memory, slots and rows stay flat, and the answers right."""

from __future__ import annotations

import gc
import resource
import time
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import ckpt_hf
from ckpt_hf import Engine
from ckpt_hf.runner import runner_of

from .models import alone, assert_no_leaks, random_ids

REQUESTS, ROUND = 20_000, 4_000
PERIOD = 40 * 5 * 7  # after which prompts come again
VOCAB = 61
SLOTS, IN_FLIGHT = 16, 256
LONGEST_ANCHOR = 49
LONGEST = LONGEST_ANCHOR + 2 + 2


def smallest_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return Qwen3_5ForCausalLM(config).eval()


def prompt_of(number: int) -> list[int]:
    """One of 40 anchors, each with 50 different suffixes, so that both come again and again."""
    anchor = random_ids(10 + number % 40, 1000 + number % 40, VOCAB)
    return [*anchor, 1 + number % 50, 1 + number % 7]


def wait_until_idle(engine: Engine) -> None:
    """A handle ends before its request gives back what it held."""
    for _ in range(1000):
        if not len(engine._loop._answers):
            return
        time.sleep(0.01)
    pytest.fail("requests are left over after their handles have ended")


def figures(model: Any) -> dict[str, int]:
    runner = runner_of(model)
    memory = runner.memory
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "slots": memory.slots.used,
        "rows": memory.kv_rows.used,
        "slots_in_pools": memory.slots.high_water,
        "rows_in_pools": memory.kv_rows.high_water,
        "checkpoints": len(memory.index),
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


@pytest.mark.slow
def test_twenty_thousand_requests_leave_nothing_behind() -> None:
    model = ckpt_hf.patch(smallest_model(), config=ckpt_hf.CheckpointConfig(cache_slots=SLOTS, max_batch_tokens=2048))
    answers = {number: alone(model, [prompt_of(number)], max_new_tokens=2)[0] for number in range(0, PERIOD, 37)}
    checked = 0
    rounds = []
    with Engine(model) as engine:
        for start in range(0, REQUESTS, ROUND):
            prompts = ({"ids": prompt_of(number), "at": 10 + number % 40} for number in range(start, start + ROUND))
            handles = (engine.submit(p["ids"], checkpoint_positions=[p["at"]], **SETTINGS) for p in prompts)
            for number, tokens in enumerate(in_windows(handles), start):
                if number % PERIOD in answers:
                    assert tokens == answers[number % PERIOD]
                    checked += 1
            wait_until_idle(engine)
            rounds.append(figures(model))
    assert_no_leaks(model)
    assert checked > 500
    stats = ckpt_hf.stats(model)
    assert stats.requests == REQUESTS
    assert stats.prompt_tokens == stats.cached_tokens + stats.computed_tokens
    assert stats.cached_tokens > stats.prompt_tokens // 2
    # The first round fills caches; after it nothing grows with the number of requests.
    first, last = rounds[0], rounds[-1]
    assert last["objects"] <= 1.02 * first["objects"] + 500, rounds
    # Where the rows of a checkpoint lie, and so how many the pools have, depends on what ran when it was made.
    limits = {"checkpoints": SLOTS, "slots": SLOTS, "rows": SLOTS * LONGEST_ANCHOR}
    limits |= {"slots_in_pools": SLOTS + IN_FLIGHT, "rows_in_pools": SLOTS * LONGEST_ANCHOR + IN_FLIGHT * LONGEST}
    for name, limit in limits.items():
        assert max(r[name] for r in rounds) <= limit, rounds
    assert last["resident_mib"] <= first["resident_mib"] + 64, rounds


SETTINGS: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}


def in_windows(handles: Any, size: int = IN_FLIGHT) -> Any:
    """Tokens of each handle in order; at most ``size`` requests are in flight."""
    window: list[Any] = []
    for handle in handles:
        window.append(handle)
        if len(window) == size:
            for waited in window:
                yield waited.result(120).generated_tokens
            window.clear()
    for waited in window:
        yield waited.result(120).generated_tokens

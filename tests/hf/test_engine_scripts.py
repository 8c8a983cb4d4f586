"""Random scripts of submit, cancel, failure, eviction and generate against the real engine: every output is right."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

import ckpt_hf
from ckpt_hf import Engine, HandleStatus

from .engine_scripts import NEW_TOKENS, PROMPTS, SCRIPTS, Action, ScriptedEngine, expected
from .models import assert_no_leaks, patched_model
from .test_decode_graphs import use_buckets

SMALL_BUCKETS = {"max_batch_tokens": 150, "max_running": 5}
LIMITS: tuple[dict[str, Any], ...] = (
    SMALL_BUCKETS,
    {"max_batch_tokens": 64, "cache_slots": 2},
    {"max_batch_tokens": 150},
    {"max_batch_tokens": 4096, "cache_slots": 0},
)


@pytest.fixture(scope="module", params=LIMITS, ids=str)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    with patched_model(verify=False, **request.param) as patched:
        if request.param is SMALL_BUCKETS:
            use_buckets(patched)
        yield patched


@settings(max_examples=60)
@given(script=SCRIPTS)
def test_every_output_of_a_script_is_right(model: Any, script: list[Action]) -> None:
    ckpt_hf.clear(model)
    ScriptedEngine(model).run(script)


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_submit_and_cancel(model: Any, seed: int) -> None:
    ckpt_hf.clear(model)
    wrong: list[Any] = []

    def user(number: int) -> None:
        choices = random.Random(100 * seed + number)
        for _ in range(15):
            prompt, new = choices.randrange(len(PROMPTS)), choices.randint(1, NEW_TOKENS)
            boundaries = sorted({b for b in (1, 64, 90, 130) if b <= len(PROMPTS[prompt]) and choices.random() < 0.7})
            handle = engine.submit(
                PROMPTS[prompt], checkpoint_positions=boundaries, max_new_tokens=new, do_sample=False
            )
            if choices.random() < 0.2:
                handle.cancel()
            output = handle.result(120)
            complete = output.status is HandleStatus.CANCELLED or len(output.generated_tokens) == new
            if not complete or output.generated_tokens != expected(prompt)[: len(output.generated_tokens)]:
                wrong.append(output)

    for prompt in range(len(PROMPTS)):
        expected(prompt)
    with Engine(model) as engine:
        threads = [threading.Thread(target=user, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert_no_leaks(model)

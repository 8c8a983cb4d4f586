"""Calls that could never end, and processes that an engine does not belong to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from ckpt_hf import CheckpointRuntimeError, Engine, open_engines

from .models import alone, assert_no_leaks, patched_model, plain_model, shared_prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
ROWS = shared_prompts(70, (5, 9))
EXPECTED = alone(plain_model(), ROWS)


class Calls(LogitsProcessor):
    """A processor that does something else first."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.act()
        return scores


def wait_for_another(engine: Engine) -> None:
    engine.submit(ROWS[0], **GREEDY).result()


def read_another(engine: Engine) -> None:
    list(engine.submit(ROWS[0], **GREEDY))


@pytest.mark.parametrize(
    "act",
    [wait_for_another, read_another, lambda engine: engine.pin(ROWS[0][:20]), Engine.close],
    ids=["result", "iterate", "pin", "close"],
)
def test_waiting_within_a_step_is_refused(act: Callable[[Engine], object]) -> None:
    """The step that such a call waits for is the one that it would hold up."""
    with patched_model() as model, Engine(model) as engine:
        bad = engine.submit(ROWS[0], logits_processor=[Calls(lambda: act(engine))], **GREEDY)
        good = engine.submit(ROWS[1], **GREEDY)
        with pytest.raises(CheckpointRuntimeError, match="within a step of the model"):
            bad.result(60)
        assert good.result(60).generated_tokens == EXPECTED[1]
        engine.close(drain=True)
        assert_no_leaks(model)


def test_closing_within_a_step_of_generate_is_refused() -> None:
    with patched_model() as model, Engine(model) as engine:
        ids = torch.tensor([ROWS[0]])
        refused = []

        def close() -> None:
            with pytest.raises(CheckpointRuntimeError, match="within a step of the model"):
                engine.close()
            refused.append(True)

        handle = engine.submit(ROWS[1], logits_processor=[Calls(close)], **GREEDY)
        out = model.generate(ids, checkpoint_positions=[[70]], **GREEDY)
        assert out[0, ids.shape[1] :].tolist() == EXPECTED[0]
        assert handle.result(60).generated_tokens == EXPECTED[1]
        assert refused


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_and_can_end() -> None:
    """It has no copy of the engine's thread, and must not wait for it when it ends."""
    with patched_model() as model, Engine(model) as engine:
        assert engine.submit(ROWS[0], **GREEDY).result(60).generated_tokens == EXPECTED[0]
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                engine.submit(ROWS[0], **GREEDY)
            except CheckpointRuntimeError as error:
                open_engines._close_all()
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert engine.submit(ROWS[1], **GREEDY).result(60).generated_tokens == EXPECTED[1]


def test_an_answer_may_be_longer_than_any_memory() -> None:
    """Room for the tokens that processors see grows with the answer, not with what it may become."""
    with patched_model() as model, Engine(model) as engine:
        handle = engine.submit(ROWS[0], max_new_tokens=10**11, do_sample=False, repetition_penalty=1.5)
        tokens = iter(handle)
        assert [next(tokens) for _ in range(3)]
        handle.cancel()
        handle.wait(60)

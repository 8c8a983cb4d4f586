"""Pinned prefixes: they stay until they are let go of, and whoever gives up asking for one leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckpt_hf import CheckpointRuntimeError, CheckpointValueError, Engine, Handle
from ckpt_hf.runner import runner_of

from .models import alone, patched_model, plain_model, random_ids, serving

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with patched_model(max_batch_tokens=256) as patched:
        yield patched


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with serving(model) as running:
        yield running


def computed(output: Any) -> int:
    tokens: int = output.usage.computed_tokens
    return tokens


def pins(model: Any) -> int:
    return sum(checkpoint.pins for checkpoint in runner_of(model).index.checkpoints)


def test_a_pinned_prefix_stays() -> None:
    with patched_model(cache_slots=2) as model, Engine(model) as engine:
        prefix = random_ids(30, 1)
        with engine.pin(prefix, timeout=60) as pin:
            assert (pin.tokens, pin.holds) == (30, True)
            for i in range(6):
                engine.submit(random_ids(20, 10 + i), checkpoint_positions=[20], **GREEDY).result(60)
            output = engine.submit([*prefix, 6, 7], **GREEDY).result(60)
            assert output.generated_tokens == alone(plain_model(), [[*prefix, 6, 7]])[0]
            assert computed(output) == 2
            again = engine.pin(prefix)
            pin.release()
            pin.release()
            assert (pin.holds, again.holds) == (False, True)
            second = engine.pin(random_ids(9, 3))
            with pytest.raises(CheckpointRuntimeError, match="no room for this prefix beside what is pinned"):
                engine.pin(random_ids(9, 4))
            second.release()
        again.release()
        for i in range(6):
            engine.submit(random_ids(20, 10 + i), checkpoint_positions=[20], **GREEDY).result(60)
        assert computed(engine.submit([*prefix, 6, 7], **GREEDY).result(60)) == 32


@pytest.mark.parametrize("cached", [False, True])
def test_a_pin_that_takes_too_long(model: Any, engine: Engine, cached: bool) -> None:
    prefix = random_ids(400, 2 + cached)
    if cached:
        engine.pin(prefix).release()
    running = engine.submit(random_ids(9, 1), max_new_tokens=2000)
    late = 0
    for attempt in range(60):
        seconds = 0.0005 * (attempt % 12)
        try:
            engine.pin(prefix, timeout=seconds).release()
        except TimeoutError:
            late += 1
        assert pins(model) == 0
    running.cancel()
    assert late


def test_an_interrupt_while_a_pin_is_awaited(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(handle: Handle, timeout: float | None = None) -> bool:
        assert wait(handle, 60)
        assert pins(model) == 1
        raise KeyboardInterrupt

    wait = Handle.wait
    monkeypatch.setattr(Handle, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.pin(random_ids(30, 5))
    assert pins(model) == 0


def test_a_pin_within_a_step(model: Any, engine: Engine) -> None:
    errors: list[Exception] = []

    def asks_for_one(ids: Any, scores: Any) -> Any:
        try:
            engine.pin(random_ids(30, 6))
        except CheckpointRuntimeError as error:
            errors.append(error)
        return scores

    engine.submit([1, 2], max_new_tokens=1, logits_processor=[asks_for_one]).result(60)
    assert "cannot pin a prefix from within a step" in str(errors[0])
    assert pins(model) == 0


def test_a_pin_of_a_step_whose_tokens_could_not_be_chosen(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory to sort the scores")

    with monkeypatch.context() as patched:
        patched.setattr("ckpt_hf.answers.choose_tokens", fails)
        with pytest.raises(CheckpointRuntimeError, match="no memory to sort the scores"):
            engine.pin(random_ids(30, 7), timeout=60)
    assert pins(model) == 0
    engine.pin(random_ids(30, 7), timeout=60).release()


@pytest.mark.parametrize("timeout", ["x", float("nan"), True, [1]])
def test_a_timeout_that_is_none(model: Any, engine: Engine, timeout: Any) -> None:
    with pytest.raises(CheckpointValueError, match="timeout must be a number of seconds or None"):
        engine.pin([1, 2], timeout=timeout)
    handle = engine.submit([1, 2], **GREEDY)
    for wait in (handle.wait, handle.result):
        with pytest.raises(CheckpointValueError, match="timeout must be a number of seconds or None"):
            wait(timeout)
    assert pins(model) == 0


@pytest.mark.parametrize("timeout", [float("inf"), 2**70, torch.tensor(60.0)])
def test_a_timeout_longer_than_locks_can_wait(engine: Engine, timeout: Any) -> None:
    engine.pin([1, 2], timeout=timeout).release()
    assert engine.submit([1, 2], **GREEDY).wait(timeout)

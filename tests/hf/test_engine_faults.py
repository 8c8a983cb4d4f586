"""What goes wrong in one request, one step or the device, and who hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import ckpt_hf
from ckpt_hf import CheckpointRuntimeError, Engine, Handle, HandleStatus
from ckpt_hf.prompts import Prompt
from ckpt_hf.runner import runner_of

from .models import (
    alone,
    assert_no_leaks,
    build_model,
    generate,
    patched_model,
    plain_model,
    random_ids,
    serving,
    shared_prompts,
)

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
ROWS = shared_prompts(70, (5, 9, 1, 30))
EXPECTED = alone(plain_model(), ROWS)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with patched_model(max_batch_tokens=128) as patched:
        yield patched


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with serving(model) as running:
        yield running


def submit_all(engine: Engine, **settings: Any) -> list[Handle]:
    return [engine.submit(row, checkpoint_positions=[70], **{**GREEDY, **settings}) for row in ROWS]


def answers(handles: list[Handle]) -> list[list[int]]:
    return [handle.result(60).generated_tokens for handle in handles]


class Fails:
    """A processor, criterion or forward hook that calls ``act`` at some of its calls, counted from 0."""

    def __init__(self, act: Callable[[], Any], *at: int) -> None:
        self.act, self.at, self.calls = act, at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if not self.at or self.calls - 1 in self.at:
            self.act()
        return args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else None


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


class FailingProcessor(Fails, LogitsProcessor):
    pass


class FailingCriterion(Fails, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        super().__call__()
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("error", [ValueError("mine"), torch.OutOfMemoryError("mine")], ids=repr)
def test_an_exception_in_one_request_s_own_code_ends_it_alone(
    engine: Engine, at: int, kind: str, error: Exception
) -> None:
    own = FailingProcessor if kind == "logits_processor" else FailingCriterion
    options: dict[str, Any] = {kind: [own(raising(error), at)]}
    failing = engine.submit(ROWS[0], checkpoint_positions=[70], **GREEDY, **options)
    others = submit_all(engine)
    with pytest.raises(CheckpointRuntimeError, match="request req_0 failed: mine") as caught:
        failing.result(60)
    assert caught.value.__cause__ is error
    assert failing.output.generated_tokens == EXPECTED[0][:at]
    assert (failing.status, failing.output.error) == (HandleStatus.FAILED, "mine")
    with pytest.raises(CheckpointRuntimeError, match="mine"):
        list(failing)
    assert answers(others) == EXPECTED


def test_a_processor_may_cancel_submit_and_read_but_not_generate(model: Any, engine: Engine) -> None:
    inner: list[Handle] = []

    def act() -> None:
        inner.append(engine.submit(ROWS[1], **GREEDY))
        inner[-1].cancel()
        inner.append(engine.submit(ROWS[1], **GREEDY))
        with pytest.raises(CheckpointRuntimeError, match="within its own forward"):
            generate(model, ROWS[:1], checkpoint_positions=[[70]])

    handle = engine.submit(ROWS[0], logits_processor=[FailingProcessor(act, 1)], **GREEDY)
    assert handle.result(60).generated_tokens == EXPECTED[0]
    assert inner[0].result(60).status is HandleStatus.CANCELLED
    assert inner[1].result(60).generated_tokens == EXPECTED[1]


def test_an_exception_in_the_forward_ends_those_in_the_step(model: Any, engine: Engine) -> None:
    running = engine.submit(random_ids(9, 1), max_new_tokens=400)
    next(iter(running))
    hook = model.model.layers[2].register_forward_pre_hook(Fails(raising(ArithmeticError("hook"))))
    handles = submit_all(engine)
    for handle in (running, *handles):
        with pytest.raises(CheckpointRuntimeError, match="hook"):
            handle.result(60)
    hook.remove()
    assert_no_leaks(model)
    assert answers(submit_all(engine)) == EXPECTED


@pytest.mark.parametrize("at", [(0,), (1,), (0, 1), (1, 3, 5), (2, 3), (0, 1, 4)], ids=str)
def test_out_of_memory_is_survived_with_less(at: tuple[int, ...], model: Any, engine: Engine) -> None:
    answers(submit_all(engine))  # checkpoints to give up
    hook = model.model.layers[2].register_forward_pre_hook(Fails(raising(torch.OutOfMemoryError("full")), *at))
    runner = runner_of(model)
    with runner.lock:  # all of them are in the first step, so that there is something to make smaller
        handles = submit_all(engine)
    assert answers(handles) == EXPECTED
    hook.remove()
    assert runner.scheduler.max_batch_tokens == 128
    assert answers(submit_all(engine)) == EXPECTED
    assert runner.scheduler.admission.limits.max_running == 256


def test_memory_that_is_never_there_ends_one_request_after_the_other(model: Any, engine: Engine) -> None:
    hook = model.model.layers[2].register_forward_pre_hook(Fails(raising(torch.OutOfMemoryError("full"))))
    handles = submit_all(engine)
    assert all(handle.wait(60) for handle in handles)
    assert {handle.output.error for handle in handles} == {"full"}
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, ROWS, checkpoint_positions=[[70]] * 4)
    hook.remove()
    assert answers(submit_all(engine)) == EXPECTED


def test_a_failed_device_ends_everything_and_says_so() -> None:
    model = ckpt_hf.patch(build_model())
    engine = Engine(model)
    assert answers(submit_all(engine)) == EXPECTED
    running = engine.submit(random_ids(9, 1), max_new_tokens=400)
    next(iter(running))
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    started = threading.Event()
    model.model.layers[2].register_forward_pre_hook(Fails(lambda: started.wait(10) and raising(error)()))
    handles = submit_all(engine)
    started.set()
    for handle in (running, *handles):
        with pytest.raises(CheckpointRuntimeError, match="illegal memory access"):
            handle.result(60)
    with pytest.raises(CheckpointRuntimeError, match=r"takes no more requests.*illegal memory access"):
        engine.submit([1, 2], max_new_tokens=1)
    with pytest.raises(CheckpointRuntimeError, match=r"device failed in an earlier step.*illegal memory access"):
        generate(model, ROWS, checkpoint_positions=[[70]] * 4)
    engine.close()


def test_closing_ends_every_handle_with_a_clear_error(model: Any) -> None:
    engine = Engine(model)
    handles = [engine.submit(random_ids(9, i), max_new_tokens=400) for i in range(3)]
    next(iter(handles[0]))
    handles += [engine.submit(random_ids(9, i), max_new_tokens=400) for i in range(300)]
    engine.close()
    for handle in handles:
        with pytest.raises(CheckpointRuntimeError, match="engine was closed before the request had ended"):
            handle.result(0)
        assert handle.output.finish_reason == "shutdown"
    assert_no_leaks(model)


def test_an_exception_in_the_with_block_does_not_wait_for_the_requests(model: Any) -> None:
    handles = []

    def leave_with_an_error() -> None:
        with Engine(model) as engine:
            handles.append(engine.submit([1, 2, 3], max_new_tokens=400))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_with_an_error()
    handle = handles[0]
    assert handle.output.finish_reason == "shutdown"
    assert_no_leaks(model)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_cancelling(engine: Engine, tokens: int) -> None:
    handle = engine.submit(ROWS[0], max_new_tokens=400, do_sample=False)
    stream = iter(handle)
    for _ in range(tokens):
        next(stream)
    assert handle.cancel()
    result = handle.result(60)
    assert (result.status, result.finish_reason) == (HandleStatus.CANCELLED, "cancelled")
    assert len(result.generated_tokens) < 400
    assert not handle.cancel()
    assert [*stream] == result.generated_tokens[tokens:]


def test_a_cancelled_producer_is_followed_by_another(model: Any, engine: Engine) -> None:
    anchor = random_ids(300, 7)
    rows = [anchor + random_ids(5, i) for i in range(4)]
    expected = alone(plain_model(), rows)
    steps = []

    def cancel_at_the_second_step(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 2:
            first.cancel()

    hook = model.model.layers[0].register_forward_pre_hook(cancel_at_the_second_step)
    first = engine.submit(rows[0], checkpoint_positions=[100, 300], **GREEDY)
    others = [engine.submit(row, checkpoint_positions=[100, 300], **GREEDY) for row in rows[1:]]
    assert [handle.result(60).generated_tokens for handle in others] == expected[1:]
    hook.remove()
    assert first.result(60).status in (HandleStatus.CANCELLED, HandleStatus.FINISHED)


def test_cancelled_and_sent_again_at_once(model: Any, engine: Engine) -> None:
    """A state that was not written is never started from."""
    row = random_ids(300, 8)
    expected = alone(plain_model(), [row])[0]
    for _ in range(5):
        engine.submit(row, checkpoint_positions=[64, 250], **GREEDY).cancel()
        again = engine.submit(row, checkpoint_positions=[64, 250], **GREEDY)
        assert again.result(60).generated_tokens == expected
        ckpt_hf.clear(model)


def test_a_reused_slot_starts_from_zero(model: Any, engine: Engine) -> None:
    for state in (*runner_of(model).states.recurrent.values(), *runner_of(model).states.conv.values()):
        state.fill_(float("nan"))
    row = random_ids(20, 3)
    for _ in range(3):
        assert engine.submit(row, **GREEDY).result(60).generated_tokens == alone(plain_model(), [row])[0]


def test_salts_are_kept_apart(engine: Engine) -> None:
    def cached(salt: str | None) -> int:
        usage = engine.submit(ROWS[0], checkpoint_positions=[70], salt=salt, **GREEDY).result(60).usage
        assert usage is not None
        assert "caller" not in str(usage.reasons)
        return usage.cached_tokens

    assert [cached(salt) for salt in ("a", "b", None, "a", "b", None)] == [0, 0, 0, 70, 70, 70]


def test_changed_weights_are_seen_between_requests() -> None:
    plain = build_model()
    with patched_model() as model, Engine(model) as engine:
        for _ in range(3):
            assert answers(submit_all(engine)) == alone(plain, ROWS)
            for changed in (model, plain):
                with torch.no_grad():
                    changed.model.layers[0].linear_attn.in_proj_qkv.weight.mul_(1.05)


def test_a_model_that_changes_its_dtype_ends_what_runs() -> None:
    model = ckpt_hf.patch(build_model())
    with Engine(model) as engine:
        running = engine.submit(random_ids(9, 1), max_new_tokens=400)
        next(iter(running))
        model.to(torch.bfloat16)
        later = engine.submit([1, 2], max_new_tokens=1)
        with pytest.raises(CheckpointRuntimeError):
            running.result(60)
        assert len(later.result(60).generated_tokens) == 1
    assert_no_leaks(model)


def test_an_interrupt_in_generate_does_not_end_the_engine(model: Any, engine: Engine) -> None:
    main = threading.current_thread()

    def interrupt(*_: Any) -> None:
        if threading.current_thread() is main:
            raise KeyboardInterrupt

    def generate_until_interrupted() -> None:
        while True:
            generate(model, ROWS, checkpoint_positions=[[70]] * 4)

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    handles = [engine.submit(row, checkpoint_positions=[70], max_new_tokens=40, do_sample=False) for row in ROWS]
    with pytest.raises(KeyboardInterrupt):
        generate_until_interrupted()
    hook.remove()
    assert answers(handles) == alone(plain_model(), ROWS, max_new_tokens=40)


@pytest.mark.gpu
def test_a_gpu_that_is_really_full() -> None:
    """Each request ends, with the right tokens or for lack of memory; with memory again all of them are served."""
    rows = [random_ids(300 + i, i) for i in range(48)]
    expected = alone(plain_model(), rows[:6], max_new_tokens=20)
    model = ckpt_hf.patch(build_model().cuda(), config=ckpt_hf.CheckpointConfig(max_batch_tokens=8192))
    total = torch.cuda.get_device_properties(0).total_memory
    with Engine(model) as engine:
        engine.submit(rows[0], **GREEDY).result(120)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (24 << 20)) / total)
        try:
            handles = [engine.submit(row, max_new_tokens=20, do_sample=False) for row in rows]
            assert all(handle.wait(300) for handle in handles)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        for handle, answer in zip(handles, expected, strict=False):
            assert handle.output.error is not None or handle.output.generated_tokens == answer
        again = [engine.submit(row, max_new_tokens=20, do_sample=False) for row in rows[:6]]
        assert answers(again) == expected


def _leave(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processor": [lambda ids, s: torch.cat([s, s + 99], dim=1)]}, "logits_processor must give"),
        ({"logits_processor": [lambda ids, s: s[0]]}, "logits_processor must give"),
        ({"stopping_criteria": [lambda ids, s, **_: torch.zeros(2, dtype=torch.bool)]}, "stopping_criteria must give"),
        ({"logits_processor": [_leave]}, "3"),
    ],
    ids=["more tokens than there are", "flat", "two verdicts", "exit"],
)
def test_a_request_s_own_code_that_answers_nonsense_ends_it_alone(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    with runner_of(engine._model).lock:
        others = submit_all(engine)
        failing = engine.submit(ROWS[0], checkpoint_positions=[70], **GREEDY, **options)
    with pytest.raises(CheckpointRuntimeError, match=message):
        failing.result(60)
    assert answers(others) == EXPECTED


@pytest.mark.parametrize("ids", [(1, -3), (1.5, 2), (), None, ("a",)], ids=str)
def test_a_prompt_object_is_checked_like_other_prompts(engine: Engine, ids: Any) -> None:
    with pytest.raises(ckpt_hf.CheckpointValueError, match="prompt"):
        engine.submit(Prompt(ids, ()), **GREEDY)

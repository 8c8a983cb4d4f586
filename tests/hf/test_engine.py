"""Submitted requests give the tokens that an unpatched model gives each of them alone."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import ckpt_hf
from ckpt_hf import CheckpointRuntimeError, CheckpointValueError, Engine, HandleStatus

from .models import (
    KINDS,
    alone,
    generate,
    new_tokens,
    patched_model,
    plain_model,
    random_ids,
    serving,
    shared_prompts,
)
from .tokenizers import build_bpe

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with patched_model(max_batch_tokens=128) as patched:
        yield patched


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with serving(model) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unpatched_model_cold_and_warm(kind: str) -> None:
    rows = [*shared_prompts(70, (5, 9, 1, 70)), random_ids(33, 8)]
    positions = [[70]] * 4 + [[]]
    expected = alone(plain_model(kind), rows)
    with patched_model(kind, max_batch_tokens=128) as model, Engine(model) as engine:
        for cached in (3 * 70, 7 * 70):
            handles = [engine.submit(r, checkpoint_positions=p, **GREEDY) for r, p in zip(rows, positions, strict=True)]
            assert [handle.result(60).generated_tokens for handle in handles] == expected
            assert ckpt_hf.stats(model).cached_tokens == cached


def test_the_order_of_arrival_changes_nothing(engine: Engine) -> None:
    base = random_ids(150, 4)
    rows = [base + random_ids(7, 5), base[:80] + random_ids(60, 6), base[:81], base]
    positions = [[1, 80, 150], [80, 100], [80, 81], [30, 80, 150]]
    expected = alone(plain_model(), rows)
    for order in itertools.permutations(range(4)):
        handles = {i: engine.submit(rows[i], checkpoint_positions=positions[i], **GREEDY) for i in order}
        assert [handles[i].result(60).generated_tokens for i in range(4)] == expected


def test_requests_that_arrive_while_others_run(engine: Engine) -> None:
    rows = [*shared_prompts(64, (3, 30, 70), seed=3), random_ids(200, 9)]
    expected = alone(plain_model(), rows, max_new_tokens=20)
    handles = []
    for row in rows:
        handles.append(engine.submit(row, checkpoint_positions=[64], max_new_tokens=20, do_sample=False))
        next(iter(handles[-1]))
    assert [list(handle) for handle in handles] == expected


def test_threads_submit_at_once(engine: Engine) -> None:
    anchors = [shared_prompts(40 + t, (3, 9, 1, 20, 5, 12), seed=t + 1) for t in range(4)]
    expected = [alone(plain_model(), rows) for rows in anchors]
    results: dict[int, list[list[int]]] = {}

    def work(thread: int) -> None:
        handles = [engine.submit(r, checkpoint_positions=[40 + thread], **GREEDY) for r in anchors[thread]]
        results[thread] = [handle.result(60).generated_tokens for handle in handles]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[t] for t in range(4)] == expected


def test_generate_and_the_engine_at_once(model: Any, engine: Engine) -> None:
    rows = shared_prompts(70, (5, 9, 1, 30))
    expected = alone(plain_model(), rows, max_new_tokens=16)
    together = new_tokens(generate(plain_model(), rows, max_new_tokens=16), rows)
    for _ in range(3):
        handles = [engine.submit(r, checkpoint_positions=[70], max_new_tokens=16, do_sample=False) for r in rows]
        result = generate(model, rows, checkpoint_positions=[[70]] * 4, max_new_tokens=16)
        assert new_tokens(result, rows) == together
        assert [handle.result(60).generated_tokens for handle in handles] == expected


def test_a_streamer_of_generate_may_wait_for_the_engine(model: Any, engine: Engine) -> None:
    row = shared_prompts(30, (5,))[0]
    expected = alone(plain_model(), [row])[0]
    answers = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            answers.append(engine.submit(row, **GREEDY).result(60).generated_tokens)

        def end(self) -> None:
            pass

    generate(model, [row], checkpoint_positions=[[30]], streamer=Streamer())
    assert answers == [expected] * 7


def test_results_have_the_fields_of_generate_batch(engine: Engine) -> None:
    row = random_ids(20, 1)
    output = engine.submit(row, checkpoint_positions=[10], request_id="mine", **GREEDY).result(60)
    assert (output.request_id, output.prompt_ids, output.error) == ("mine", row, None)
    assert output.status is HandleStatus.FINISHED
    assert output.is_finished()
    assert output.finish_reason == "length"
    assert output.usage is not None
    assert (output.usage.cached_tokens, output.usage.computed_tokens) == (0, 20)
    assert (
        output.created_time < output.lifespan[0] == output.timestamps[0] <= output.timestamps[-1] < output.lifespan[1]
    )
    again = engine.submit(row, checkpoint_positions=[10], **GREEDY).result(60)
    assert again.usage is not None
    assert (again.usage.cached_tokens, again.usage.computed_tokens) == (10, 10)


def test_end_tokens_and_length_limits(engine: Engine) -> None:
    row = random_ids(20, 2)
    greedy = alone(plain_model(), [row], max_new_tokens=10)[0]
    output = engine.submit(row, GenerationConfig(max_new_tokens=10, eos_token_id=[greedy[4], 198])).result(60)
    assert (output.generated_tokens, output.finish_reason) == (greedy[: greedy.index(greedy[4]) + 1], "eos")
    output = engine.submit(row, max_length=23).result(60)
    assert (output.generated_tokens, output.finish_reason) == (greedy[:3], "length")
    with pytest.raises(CheckpointValueError, match="is set to 20"):
        engine.submit(row, max_length=20)


def test_await_and_async_for(engine: Engine) -> None:
    rows = shared_prompts(30, (5, 9, 2))
    expected = alone(plain_model(), rows, max_new_tokens=12)

    async def stream(row: list[int]) -> list[int]:
        return [token async for token in engine.submit(row, max_new_tokens=12, do_sample=False)]

    async def all_of_them() -> tuple[Any, ...]:
        handle = engine.submit(rows[0], max_new_tokens=12, do_sample=False)
        streams = await asyncio.gather(*map(stream, rows))
        return streams, (await handle).generated_tokens, (await handle).generated_tokens

    streams, first, again = asyncio.run(all_of_them())
    assert streams == expected
    assert first == again == expected[0]


def test_an_event_loop_that_closes_before_the_answer(engine: Engine) -> None:
    handle = engine.submit(random_ids(20, 1), max_new_tokens=60)

    async def impatient() -> None:
        await asyncio.wait_for(handle, 0.001)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert len(handle.result(60).generated_tokens) == 60


def test_waiting_has_a_limit(engine: Engine) -> None:
    handle = engine.submit(random_ids(20, 1), max_new_tokens=100)
    with pytest.raises(TimeoutError, match=r"req_0 is \w+ after 0"):
        handle.result(0)
    handle.cancel()


def test_map_keeps_order_and_bounds_what_is_in_flight(engine: Engine) -> None:
    rows = [random_ids(5 + i % 7, i) for i in range(60)]
    expected = alone(plain_model(), rows, max_new_tokens=2)
    drawn = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal drawn
        for row in rows:
            drawn += 1
            yield row

    results = []
    for output in engine.imap(prompts(), max_new_tokens=2, do_sample=False, in_flight=8):
        results.append(output.generated_tokens)
        assert drawn <= len(results) + 8
    assert results == expected
    outputs = engine.map(rows, max_new_tokens=2, do_sample=False, progress_bar=False)
    assert [output.generated_tokens for output in outputs] == expected


def test_map_reads_an_encoded_batch(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shared_prompts(30, (5, 9))
    batch = {"input_ids": torch.tensor([[0] * 4 + rows[0], rows[1]]), "checkpoint_positions": [[30], [30]]}
    batch["attention_mask"] = torch.tensor([[0] * 4 + [1] * 35, [1] * 39])
    outputs = engine.map(batch, progress_bar=True, **GREEDY)
    assert capsys.readouterr().out == ""
    assert [output.generated_tokens for output in outputs] == alone(plain_model(), rows)
    assert sum(output.usage.cached_tokens for output in outputs if output.usage is not None) == 30


def test_a_prompt_that_cannot_be_read_fails_alone(engine: Engine) -> None:
    rows: list[Any] = [[1, 2, 3], None, [4, 5], [], [9999], [6]]
    outputs = engine.map(rows, progress_bar=False, **GREEDY)
    assert [output.status is HandleStatus.FAILED for output in outputs] == [False, True, False, True, True, False]
    good = [outputs[i].generated_tokens for i in (0, 2, 5)]
    assert good == alone(plain_model(), [[1, 2, 3], [4, 5], [6]])
    with pytest.raises(CheckpointValueError, match="'max_tokens'"):
        engine.map(rows, progress_bar=False, max_tokens=3)


def test_leaving_imap_cancels_the_rest(engine: Engine, model: Any) -> None:
    prompts = itertools.chain([[7] * 295], itertools.repeat([7, 8, 9]))
    results = engine.imap(prompts, max_length=300, in_flight=16)
    assert len(next(results).generated_tokens) == 5
    results.close()
    handle = engine.submit([5], max_new_tokens=1)
    handle.result(60)
    deadline = time.monotonic() + 60
    while len(model.__dict__["_ckpt_hf_runner"].scheduler.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ckpt_hf.stats(model).generated_tokens < 15 * 290


def test_an_idle_engine_starts_again() -> None:
    with patched_model() as model, Engine(model) as engine:
        time.sleep(0.05)
        for _ in range(2):
            assert len(engine.submit([1, 2, 3], max_new_tokens=2).result(60).generated_tokens) == 2
            time.sleep(0.05)


def test_one_engine_a_model_and_its_settings() -> None:
    with patched_model() as model:
        with pytest.raises(CheckpointValueError, match=r"cache_bytes.* must be None for a patched model"):
            Engine(model, cache_bytes=1)
        with Engine(model):
            with pytest.raises(CheckpointRuntimeError, match="already has a running engine"):
                Engine(model)
            with pytest.raises(CheckpointRuntimeError, match="cannot unpatch while an engine runs"):
                ckpt_hf.unpatch(model)
        with Engine(model) as engine:
            engine.submit([1, 2], max_new_tokens=1).result(60)
        with pytest.raises(CheckpointRuntimeError, match="takes no more requests: it is closed"):
            engine.submit([1, 2], max_new_tokens=1)
        engine.close()


def test_an_engine_patches_for_as_long_as_it_is_open() -> None:
    from .models import build_model

    model = build_model()
    with Engine(model, max_batch_tokens=64, cache_slots=3) as engine:
        expected = alone(plain_model(), [[1, 2, 3]])
        assert engine.submit([1, 2, 3], **GREEDY).result(60).generated_tokens == expected[0]
    assert "generate" not in model.__dict__


def config_with(**settings: Any) -> GenerationConfig:
    """A configuration changed after transformers has looked at it."""
    config = GenerationConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    return config


NESTED: list[Any] = []
NESTED.append(NESTED)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "empty": (([],), {}, r"at least one token id .*got list of shape \[0\]"),
    "two rows": ((torch.ones(2, 3, dtype=torch.long),), {}, r"at least one token id .*shape \[2, 3\]"),
    "no ids": (({"a": 1},), {}, "prompt must be text or at least one token id .*got dict"),
    "ragged": (([1, [2]],), {}, "cannot be read as token ids"),
    "floats": (([1.0, 2.0],), {}, "integers"),
    "unknown id": (([1, 5000],), {}, "holds id 5000"),
    "too long": (([1] * 513,), {}, "the model has 512 positions"),
    "text": (("hello",), {}, "needs a tokenizer"),
    "salt": (([1],), {"salt": 3}, "salt must be a str"),
    "priority": (([1],), {"priority": "high"}, "priority must be an int"),
    "seed": (([1],), {"seed": 1.5}, "seed must be an int"),
    "large seed": (
        ([1],),
        {"seed": 2**80},
        r"seed must be from -2\*\*63 to 2\*\*64 - 1, got 1208925819614629174706176",
    ),
    "small seed": (([1],), {"seed": -(2**63) - 1}, "seed must be from"),
    "name": (([1],), {"request_id": 5}, "request_id must be a str or None, got int"),
    "kept prompt": (([1],), {"keep_prompt": "x"}, "keep_prompt must be a bool or None, got 'x'"),
    "kept answer": (([1],), {"keep_answer": 1}, "keep_answer must be a bool or None, got 1"),
    "sampling": (([1],), {"do_sample": "x"}, "do_sample must be a bool or None, got 'x'"),
    "a list in itself": (([1],), {"bad_words_ids": NESTED}, "generation_config or a setting is wrong"),
    "position": (([1, 2],), {"checkpoint_positions": [3]}, "checkpoint_positions row 0 holds 3"),
    "config": (([1], {"max_new_tokens": 3}), {}, "generation_config must be a GenerationConfig"),
    "beams": (([1],), {"num_beams": 3}, "asks for beam_search"),
    "unknown": (([1],), {"max_tokens": 3}, "'max_tokens'"),
    "length as text": (([1],), {"max_new_tokens": "3"}, "max_new_tokens must be an integer or None, got '3'"),
    "half a token": (([1],), {"min_new_tokens": 2.5}, "min_new_tokens must be an integer or None, got 2.5"),
    "a bool as length": (([1],), {"max_length": True}, "max_length must be an integer or None, got True"),
    "length in a config": (([1], config_with(max_new_tokens="3")), {}, "max_new_tokens must be an integer"),
    "end": (([1],), {"eos_token_id": "x"}, "eos_token_id must be a token id, .* got 'x'"),
    "one end of two": (([1],), {"eos_token_id": [3, 1.5]}, r"eos_token_id must be a token id, .* got \[3, 1.5\]"),
    "no end": (([1],), {"eos_token_id": []}, r"eos_token_id must be a token id, .* got \[\]"),
    "huge end": (([1],), {"eos_token_id": 2**70}, "eos_token_id must be a token id"),
    "processor": (([1],), {"logits_processor": 5}, "logits_processor must be a list of callables or None, got int"),
    "bare processor": (([1],), {"logits_processor": print}, "logits_processor must be a list .* put it into one"),
    "no processor": (([1],), {"logits_processor": [5]}, r"logits_processor\[0\] must be callable, got int"),
    "tensor as processor": (([1],), {"logits_processor": torch.ones(2)}, "must be a list of callables .* got Tensor"),
    "criteria": (([1],), {"stopping_criteria": 0}, "stopping_criteria must be a list of callables or None, got int"),
    "no criterion": (([1],), {"stopping_criteria": [print, "x"]}, r"stopping_criteria\[1\] must be callable, got str"),
    "allowed": (([1],), {"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn must be callable or None, got int"),
    "time": (([1],), {"max_time": "x"}, "max_time must be a number or None, got 'x'"),
    "top-p": (([1],), {"do_sample": True, "top_p": "x"}, "top_p must be a number or None, got 'x'"),
    "temperature": (([1],), {"do_sample": True, "temperature": 0.0}, "`temperature` .* strictly positive"),
    "static cache": (([1],), {"cache_implementation": "static"}, "not for an engine: cache_implementation is 'static'"),
    "no cache": (([1],), {"use_cache": False}, "not for an engine: use_cache is False"),
    "guidance": (([1],), {"guidance_scale": 2.0}, "not for an engine: guidance_scale is set"),
    "attentions": (([1], config_with(output_attentions=True)), {}, "not for an engine: output_attentions is set"),
    "what only transformers checks": (([1],), {"watermarking_config": 3}, "a setting is wrong: 'int' object"),
    "stop strings": (([1],), {"stop_strings": "x", "max_new_tokens": 1}, "could not locate a tokenizer"),
}


def test_text_without_tokens_is_named_as_such(model: Any) -> None:
    with Engine(model, build_bpe()) as engine, pytest.raises(CheckpointValueError, match="text that gives no token"):
        engine.submit("")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told_to_the_caller_at_once(engine: Engine, name: str) -> None:
    args, kwargs, message = WRONG[name]
    other = engine.submit([1, 2, 3], **GREEDY)
    with pytest.raises(CheckpointValueError, match=message):
        engine.submit(*args, **kwargs)
    assert len(other.result(60).generated_tokens) == GREEDY["max_new_tokens"]


@pytest.mark.parametrize("prompts", [5, None, torch.tensor(3)])
def test_what_holds_no_prompts_is_refused(engine: Engine, prompts: Any) -> None:
    with pytest.raises(CheckpointValueError, match="prompts must be an iterable of prompts or a batch"):
        engine.map(prompts)


@pytest.mark.parametrize("ends", [7, [7, 9], (7, 9), torch.tensor([7, 9]), np.int64(7), -1])
def test_end_tokens_of_every_kind_are_taken(engine: Engine, ends: Any) -> None:
    assert engine.submit([1, 2], eos_token_id=ends, max_new_tokens=torch.tensor(3), do_sample=False).result(60)

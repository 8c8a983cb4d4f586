"""Each request samples by its own settings and its own random numbers, as transformers does for it alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation import StopStringCriteria

import ckpt_hf
from ckpt_hf import MARKER, Engine
from ckpt_hf.setting_checks import equality_key

from .models import alone, generate, new_tokens, patched_model, plain_model, random_ids, shared_prompts
from .tokenizers import build_bpe, build_words

VOCAB = 450


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with patched_model(max_batch_tokens=128) as model, Engine(model) as running:
        yield running


class Favour(LogitsProcessor):
    """Depends on the tokens so far and on how often it was called."""

    def __init__(self, token: int) -> None:
        self.token, self.calls = token, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (self.token + int(input_ids.sum()) + self.calls) % scores.shape[1]] += 5.0
        return scores


class SumReaches(StoppingCriteria):
    """Stops once the new tokens sum up to a number."""

    def __init__(self, start: int, limit: int) -> None:
        self.start, self.limit = start, limit

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, self.start :].sum(dim=1) >= self.limit


ROW = random_ids(30, 5)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 1.7, "top_k": 0},
    "top-k and top-p": {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.8},
    "min-p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "typical": {"do_sample": True, "typical_p": 0.7, "epsilon_cutoff": 1e-3},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.8},
    "prompt penalty": {"do_sample": False, "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "n-grams": {"do_sample": True, "no_repeat_ngram_size": 1},
    "bad words": {"do_sample": False, "bad_words_ids": [[3], [17, 4]], "eos_token_id": 9},
    "minimum": {"do_sample": False, "min_new_tokens": 8, "eos_token_id": list(range(1, 150))},
    "minimum length": {"do_sample": False, "min_length": 36, "eos_token_id": list(range(1, 150))},
    "suppressed": {"do_sample": True, "suppress_tokens": list(range(100)), "begin_suppress_tokens": [150]},
    "forced end": {"do_sample": False, "forced_eos_token_id": 7},
    "bias": {"do_sample": False, "sequence_bias": [[[4], 8.0], [[4, 9], 10.0]]},
    "decaying": {"do_sample": False, "exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 9},
    "ends": {"do_sample": True, "eos_token_id": list(range(60))},
}


def expected(row: list[int], settings: dict[str, Any], seed: int) -> list[int]:
    torch.manual_seed(seed)
    return alone(plain_model(), [row], **{"max_new_tokens": 12, **settings})[0]


@pytest.mark.filterwarnings("ignore:.*max_new_tokens")
@pytest.mark.parametrize("name", SETTINGS)
def test_one_request(engine: Engine, name: str) -> None:
    config = GenerationConfig(max_new_tokens=12, **SETTINGS[name])
    result = engine.submit(ROW, config, seed=3).result(60)
    assert result.generated_tokens == expected(ROW, SETTINGS[name], 3)


def test_all_settings_in_one_batch(engine: Engine) -> None:
    rows = shared_prompts(40, [1 + i for i in range(2 * len(SETTINGS))], seed=6)
    jobs = [(row, list(SETTINGS.values())[i % len(SETTINGS)], i) for i, row in enumerate(rows)]
    handles = [
        engine.submit(row, seed=seed, checkpoint_positions=[40], **{"max_new_tokens": 12, **settings})
        for row, settings, seed in jobs
    ]
    assert [handle.result(60).generated_tokens for handle in handles] == [expected(*job) for job in jobs]


def test_a_changed_config_is_read_anew(engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=5)
    first = engine.submit(ROW, config)
    config.max_new_tokens = 9
    assert [len(h.result(60).generated_tokens) for h in (first, engine.submit(ROW, config))] == [5, 9]


class LooksLikeFive(int):
    """An id whose text is another one's."""

    def __repr__(self) -> str:
        return "5"


def test_settings_with_equal_texts_stay_apart(engine: Engine) -> None:
    likeliest = expected(ROW, {"do_sample": False}, 0)[0]
    free = torch.full((1200,), (likeliest + 1) % 199)
    suppressed = free.clone()
    suppressed[600] = likeliest
    assert repr(free) == repr(suppressed)
    for tokens in (free, suppressed, free):
        answer = engine.submit(ROW, suppress_tokens=tokens, do_sample=False, max_new_tokens=1).result(60)
        assert (answer.generated_tokens == [likeliest]) is (tokens is free)
    for end in (likeliest + 1, likeliest):
        answer = engine.submit(ROW, eos_token_id=LooksLikeFive(end), do_sample=False, max_new_tokens=2).result(60)
        assert answer.finish_reason == ("eos" if end == likeliest else "length")


def test_an_equality_key_is_equal_for_equal_values_alone() -> None:
    equal = [[1, (2.5, None)], {"a": [torch.tensor([3]), np.ones(2)]}, "x", True, float("nan"), torch.float32]
    for value in equal:
        assert equality_key(value) == equality_key(copy.deepcopy(value)) is not None
    different = [1, 1.0, True, "1", [1], (1,), {1: 1}, None, torch.tensor(1), torch.tensor([1]), np.int64(1), 0.0, -0.0]
    assert len({equality_key(value) for value in different}) == len(different)
    assert equality_key(LooksLikeFive(3)) is equality_key([object()]) is equality_key({"a": print}) is None


def test_random_numbers_follow_torch_s_seed(engine: Engine) -> None:
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        handles = [engine.submit(ROW, do_sample=True, max_new_tokens=12, temperature=2.0) for _ in range(3)]
        draws.append([handle.result(60).generated_tokens for handle in handles])
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != draws[0][1] != draws[0][2]


def test_processors_and_criteria_of_the_caller(engine: Engine) -> None:
    rows = shared_prompts(20, [4] * 6, seed=9)
    criteria = [[SumReaches(24, 500 * (i + 1))] for i in range(6)]
    want = [
        alone(plain_model(), [row], logits_processor=[Favour(i)], stopping_criteria=criteria[i], max_new_tokens=15)[0]
        for i, row in enumerate(rows)
    ]
    handles = [
        engine.submit(row, logits_processor=[Favour(i)], stopping_criteria=criteria[i], max_new_tokens=15)
        for i, row in enumerate(rows)
    ]
    results = [handle.result(60) for handle in handles]
    assert [result.generated_tokens for result in results] == want
    assert {r.finish_reason for r in results} == {"stop", "length"}


def test_allowed_tokens(engine: Engine) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [(3 * len(ids)) % 199, (5 * len(ids)) % 199]

    want = alone(plain_model(), [ROW], prefix_allowed_tokens_fn=allowed)
    handle = engine.submit(ROW, prefix_allowed_tokens_fn=allowed, max_new_tokens=6, do_sample=False)
    assert handle.result(60).generated_tokens == want[0]


@pytest.mark.parametrize("build", [build_bpe, build_words])
def test_text_in_and_out(build: Any) -> None:
    tokenizer = build()
    prompt = "the red shoes and the blue hat"
    text, tail = prompt[:13], prompt[13:]
    with patched_model("dense-2", tokenizer, VOCAB) as model, Engine(model, tokenizer) as engine:
        marked = tokenizer(text + MARKER + tail)["input_ids"]
        ids = [token for token in marked if token != ckpt_hf.marker_id(tokenizer)]
        want = alone(plain_model("dense-2", VOCAB), [ids], max_new_tokens=10)[0]
        handle = engine.submit(text + MARKER + tail, max_new_tokens=10, do_sample=False)
        assert handle.result(60).generated_tokens == want
        assert handle.output.usage is not None
        assert handle.output.usage.boundaries == (marked.index(ckpt_hf.marker_id(tokenizer)),)
        pieces = list(handle.text())
        assert "".join(pieces) == tokenizer.decode(want, skip_special_tokens=True)
        assert "".join(handle.text(skip_special_tokens=False)) == tokenizer.decode(want)


def test_stop_strings() -> None:
    tokenizer = build_bpe()
    with patched_model("dense-2", tokenizer, VOCAB) as model, Engine(model, tokenizer) as engine:
        ids = tokenizer("the red shoes and the blue hat")["input_ids"]
        plain = plain_model("dense-2", VOCAB)
        stop = tokenizer.decode(alone(plain, [ids], max_new_tokens=10)[0][3:5])
        criteria = [StopStringCriteria(tokenizer, [stop])]
        want = new_tokens(generate(plain, [ids], max_new_tokens=10, stopping_criteria=criteria), [ids])[0]
        result = engine.submit(ids, max_new_tokens=10, stop_strings=[stop], do_sample=False).result(60)
        assert (result.generated_tokens, result.finish_reason) == (want, "stop")
        assert len(want) < 10


def test_the_marker_is_never_generated() -> None:
    tokenizer = build_bpe()
    with patched_model("dense-2", tokenizer, VOCAB) as model, Engine(model, tokenizer) as engine:
        marker = ckpt_hf.marker_id(tokenizer)
        assert marker is not None
        bias = [[[marker], 1e4]]
        for more in ({}, {"sequence_bias": bias}):
            result = engine.submit([5, 6, 7], max_new_tokens=4, do_sample=False, **more).result(60)
            assert marker not in result.generated_tokens

"""What ``generate`` promises beside tokens, and the calls that transformers runs itself."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import ckpt_hf
from ckpt_hf import MARKER, CheckpointWarning

from .models import (
    TokenSpy,
    alone,
    assert_no_leaks,
    generate,
    new_tokens,
    padded,
    patched_model,
    place_markers,
    plain_model,
    shared_prompts,
)
from .tokenizers import build_bpe

VOCAB = 450  # above every id of the tokenizer below, its marker's aside or not
ROWS = shared_prompts(70, (5, 9))
EQUAL = shared_prompts(70, (6, 6))


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with patched_model() as patched:
        yield patched


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        assert_no_leaks(request.getfixturevalue("model"))


def both(model: Any, rows: list[list[int]] = ROWS, **kwargs: Any) -> tuple[Any, Any]:
    """The same call on the unpatched model and, with checkpoints at 70, on the patched one."""
    torch.manual_seed(7)
    expected = generate(plain_model(), rows, **kwargs)
    torch.manual_seed(7)
    return expected, generate(model, rows, checkpoint_positions=[[70]] * len(rows), **kwargs)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.puts.append("end")


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"eos_token_id": 60}], ids=str)
def test_streamer_gets_the_same_puts(model: Any, settings: dict[str, Any]) -> None:
    recorders = Recorder(), Recorder()
    for which, recorder in zip((plain_model(), model), recorders, strict=True):
        torch.manual_seed(1)
        marked: dict[str, Any] = {} if which is not model else {"checkpoint_positions": [[70]] * 2}
        generate(which, ROWS, streamer=recorder, **marked, **settings)
    assert recorders[0].puts == recorders[1].puts
    assert len(recorders[0].puts) > 2


def test_text_streamer_in_a_thread() -> None:
    tokenizer = build_bpe()
    with patched_model("dense-2", tokenizer, VOCAB) as model:
        texts = {}
        for which, text in ((plain_model("dense-2", VOCAB), "red shoes"), (model, f"{MARKER}red shoes{MARKER}")):
            encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
            kwargs = {**encoded, "streamer": streamer, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            thread = threading.Thread(target=which.generate, kwargs=kwargs)
            thread.start()
            texts[which is model] = "".join(streamer)
            thread.join()
        assert texts[True] == texts[False] != ""


@pytest.mark.parametrize("place", ["argument", "config", "model"])
def test_stop_strings(place: str) -> None:
    tokenizer = build_bpe()
    row = tokenizer("red shoes, size 41")["input_ids"]
    plain = plain_model("dense-2", VOCAB)
    text = tokenizer.decode(alone(plain, [row], max_new_tokens=12)[0][3])
    with patched_model("dense-2", tokenizer, VOCAB) as model:
        results = []
        for which, marked in ((plain, {}), (model, {"checkpoint_positions": [[5]]})):
            own = which.generation_config
            config = GenerationConfig(stop_strings=text, max_new_tokens=12, pad_token_id=0, do_sample=False)
            call: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
            if place == "argument":
                call["stop_strings"] = text
            elif place == "config":
                call = {"generation_config": config}
            else:
                which.generation_config = config
            try:
                results.append(which.generate(torch.tensor([row]), tokenizer=tokenizer, **call, **marked))
            finally:
                which.generation_config = own
        assert torch.equal(*results)
        assert results[0].shape[1] < len(row) + 12
        assert "stop_strings" not in call or call["stop_strings"] == text


class Forbid(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
        scores[:, scores.argmax(-1)[0]] = -torch.inf
        return scores


class AfterThree(StoppingCriteria):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([self.calls >= 3 + row for row in range(len(input_ids))])


def test_custom_processor_and_criterion(model: Any) -> None:
    expected = generate(plain_model(), ROWS, logits_processor=[Forbid()], stopping_criteria=[AfterThree()])
    criteria, processors = [AfterThree()], [Forbid()]
    result = generate(
        model, ROWS, checkpoint_positions=[[70]] * 2, logits_processor=processors, stopping_criteria=criteria
    )
    assert torch.equal(result, expected)
    assert (len(processors), len(criteria)) == (1, 1)
    ids, mask = padded(ROWS)
    positional = model.generate(
        ids, None, [Forbid()], [AfterThree()], attention_mask=mask, checkpoint_positions=[[70]] * 2,
        max_new_tokens=6, do_sample=False, pad_token_id=0, custom_generate=None,
    )  # fmt: skip
    assert torch.equal(positional, expected)


@pytest.mark.parametrize("sample", [False, True])
def test_scores_and_logits(model: Any, sample: bool) -> None:
    flags: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, result = both(model, do_sample=sample, top_k=20 if sample else None, **flags)
    assert torch.equal(result.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert len(ours) == len(theirs) == 6
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("end", [70, 75])
@pytest.mark.parametrize("eos", [None, 60])
def test_the_returned_cache_goes_on(model: Any, end: int, eos: int | None) -> None:
    rows = [ROWS[0][:end]] if eos is None else [ROWS[0]]
    ids = torch.tensor(rows)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    first = {"return_dict_in_generate": True, "eos_token_id": eos}
    expected = plain_model().generate(ids, **settings, **first)
    result = model.generate(ids, checkpoint_positions=[[70]], **settings, **first)
    assert result.cache.get_seq_length() == expected.cache.get_seq_length()
    follow = torch.cat([expected.sequences, torch.tensor([[3, 4, 5]])], dim=1)
    for which in (plain_model(), model):
        cache = copy.deepcopy(result.cache)
        assert torch.equal(
            which.generate(follow, cache=cache, **settings),
            plain_model().generate(follow, cache=copy.deepcopy(expected.cache), **settings),
        )


HANDED_OVER: dict[str, dict[str, Any]] = {
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "ragged beams": {"num_beams": 3},
    "beams without cache": {"num_beams": 2, "use_cache": False},
    "beams, static": {"num_beams": 2, "cache_implementation": "static", "disable_compile": True},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.filterwarnings("ignore:.*attention.*")
@pytest.mark.parametrize("mode", HANDED_OVER)
def test_calls_that_transformers_runs(model: Any, mode: str) -> None:
    rows = EQUAL if "beams " in mode or "beams," in mode else ROWS
    why = "beam search needs rows of one length" if mode == "ragged beams" else ""
    with pytest.warns(CheckpointWarning, match=f"checkpoints are not used in this call because {why}"):
        expected, result = both(model, rows, **HANDED_OVER[mode])
    assert new_tokens(result, rows) == new_tokens(expected, rows)


@pytest.mark.parametrize(
    "more", [{}, {"num_return_sequences": 3}, {"length_penalty": 2.0, "eos_token_id": 60}], ids=str
)
def test_beams_start_from_a_checkpoint(model: Any, more: dict[str, Any]) -> None:
    ckpt_hf.clear(model)
    with warnings.catch_warnings(), TokenSpy(model) as spy:
        warnings.simplefilter("error", CheckpointWarning)
        expected, result = both(model, EQUAL, num_beams=3, **more)
    assert torch.equal(result, expected)
    assert [len(row) for call in spy.calls[:2] for row in call] == [70] + [6] * 6


@pytest.mark.parametrize("beams", [1, 2])
def test_the_caller_s_cache_is_filled(model: Any, beams: int) -> None:
    cache = DynamicCache(config=model.config)
    with pytest.warns(CheckpointWarning, match="cache is given"):
        result = generate(model, EQUAL, checkpoint_positions=[[70]] * 2, cache=cache, num_beams=beams)
    assert torch.equal(result, generate(plain_model(), EQUAL, num_beams=beams))
    assert cache.get_seq_length() == 76 + 6 - 1


def test_hidden_tokens_and_training_mode(model: Any) -> None:
    tokenizer = build_bpe()
    with patched_model("dense-2", tokenizer, VOCAB) as other:
        marker = tokenizer.convert_tokens_to_ids(MARKER)
        row = ROWS[0][:20]
        ids, mask = torch.tensor([row]), torch.ones(1, 20, dtype=torch.long)
        mask[0, 8] = 0
        marked = torch.tensor([place_markers(marker, row, 12)])
        marked_mask = torch.ones_like(marked)
        marked_mask[0, 8] = 0
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        with pytest.warns(CheckpointWarning, match="zeros between"):
            result = other.generate(marked, attention_mask=marked_mask, **settings)
        expected = plain_model("dense-2", VOCAB).generate(ids, attention_mask=mask, **settings)
        assert torch.equal(result[:, 21:], expected[:, 20:])
    model.train()
    try:
        with pytest.warns(CheckpointWarning, match="training"):
            result = generate(model, ROWS, checkpoint_positions=[[70]] * 2)
    finally:
        model.eval()
    assert torch.equal(result, generate(plain_model(), ROWS))


def test_a_warning_about_a_prompt_points_at_the_caller(model: Any) -> None:
    with pytest.warns(CheckpointWarning, match="more than once") as caught:
        model.generate(torch.tensor([[1, 2, 3]]), checkpoint_positions=[[2, 2]], max_new_tokens=1)
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]

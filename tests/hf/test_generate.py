"""Marked prompts give what unmarked prompts give to an unpatched model, whatever their shape, order and padding."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ckpt_hf
from ckpt_hf import MARKER, CheckpointWarning

from .models import (
    KINDS,
    TokenSpy,
    alone,
    assert_no_leaks,
    generate,
    new_tokens,
    padded,
    patched_model,
    place_markers,
    plain_model,
    random_ids,
    shared_prompts,
)
from .tokenizers import build_bpe, build_words

VOCAB = 450  # above every id of the tokenizers, their markers' aside or not
# Around the chunk of the recurrence (64) and two of them; 1 is the smallest, shorter than the convolution.
LENGTHS = (1, 63, 64, 65, 127)
LIMITS: tuple[dict[str, Any], ...] = ({}, {"max_batch_tokens": 64}, {"cache_slots": 0}, {"cache_slots": 1})


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with patched_model() as patched:
        yield patched


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        patched = request.getfixturevalue("model")
        assert_no_leaks(patched)
        ckpt_hf.clear(patched)
        ckpt_hf.reset_stats(patched)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_unpatched_model_twice(kind: str) -> None:
    rows = shared_prompts(70, (5, 9, 1, 70))
    expected = generate(plain_model(kind), rows)
    with patched_model(kind) as model:
        for cached in (3 * 70, 4 * 70):
            ckpt_hf.reset_stats(model)
            assert torch.equal(generate(model, rows, checkpoint_positions=[[70]] * 4), expected)
            assert ckpt_hf.stats(model).cached_tokens == cached


@pytest.mark.parametrize("prefix", LENGTHS)
def test_lengths_of_prefix_and_suffix(model: Any, prefix: int) -> None:
    rows = shared_prompts(prefix, LENGTHS)
    expected = new_tokens(generate(plain_model(), rows), rows)
    for _ in range(2):
        assert new_tokens(generate(model, rows, checkpoint_positions=[[prefix]] * len(rows)), rows) == expected


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_padding_gives_each_row_as_if_alone(side: str, limits: dict[str, Any]) -> None:
    rows = [*shared_prompts(66, (3, 64, 1)), random_ids(9, 50)]
    expected = alone(plain_model(), rows)
    with patched_model(**limits) as model:
        result = generate(model, rows, side=side, checkpoint_positions=[[66], [66], [66], []])
        assert new_tokens(result, rows) == expected
        assert torch.equal(result[:, :130], padded(rows, side)[0])


def test_pads_on_both_sides_and_a_single_padded_row(model: Any) -> None:
    row = random_ids(40, 3)
    ids = torch.tensor([[0] * 5 + row + [0] * 3])
    mask = torch.tensor([[0] * 5 + [1] * 40 + [0] * 3])
    expected = alone(plain_model(), [row])
    result = model.generate(
        ids, attention_mask=mask, checkpoint_positions=[[17]], max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert result[:, 48:].tolist() == expected
    inferred = model.generate(ids, checkpoint_positions=[17], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(inferred, result)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_several_anchors_and_unmarked_rows(limits: dict[str, Any]) -> None:
    rows = [row for seed in (1, 2, 3) for row in shared_prompts(64 + seed, (4, 70), seed)] + [random_ids(33, 9)]
    positions = [[64 + seed] for seed in (1, 2, 3) for _ in range(2)] + [[-1]]
    expected = new_tokens(generate(plain_model(), rows), rows)
    with patched_model(**limits) as model:
        for _ in range(2):
            assert new_tokens(generate(model, rows, checkpoint_positions=positions), rows) == expected
            assert_no_leaks(model)
        kept = {"cache_slots": limits.get("cache_slots", 3)}
        assert ckpt_hf.stats(model).checkpoints == kept["cache_slots"]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_chains_of_boundaries(limits: dict[str, Any]) -> None:
    base = random_ids(200, 4)
    rows = [base[:150] + random_ids(7, 5), base[:80] + random_ids(90, 6), base[:81], base]
    positions = [[1, 80, 150], [80, 100], [80, 81], [30, 80, 150, 200]]
    expected = alone(plain_model(), rows)
    for order in itertools.permutations(range(4)):
        if order[0] not in (0, 3) and limits:
            continue
        with patched_model(verify=False, **limits) as model:
            shuffled = [rows[i] for i in order]
            for _ in range(2 if order[0] == 0 else 1):
                result = generate(model, shuffled, checkpoint_positions=[positions[i] for i in order])
                assert new_tokens(result, rows) == [expected[i] for i in order]


def test_rows_that_end_where_another_row_goes_on(model: Any) -> None:
    anchor = random_ids(64, 7)
    rows = [anchor, anchor + random_ids(5, 8), anchor, anchor[:32]]
    positions = [[64], [32, 64], [32, 64], [32]]
    expected = alone(plain_model(), rows)
    for order in itertools.permutations(range(4)):
        ckpt_hf.clear(model)
        ckpt_hf.reset_stats(model)
        for _ in range(2):
            result = generate(model, [rows[i] for i in order], checkpoint_positions=[positions[i] for i in order])
            assert new_tokens(result, rows) == [expected[i] for i in order]


def test_positions_as_tensors_lists_and_a_flat_list(model: Any) -> None:
    rows = shared_prompts(20, (3, 5))
    expected = new_tokens(generate(plain_model(), rows), rows)
    for positions in (torch.tensor([[20, -1], [10, 20]]), ([20], (10, 20)), [torch.tensor([20]), [10, 20]]):
        assert new_tokens(generate(model, rows, checkpoint_positions=positions), rows) == expected
    for flat in ([20], (10, 20), torch.tensor([20])):
        assert new_tokens(generate(model, rows[:1], checkpoint_positions=flat), rows[:1]) == expected[:1]


def test_sampling_draws_what_transformers_draws(model: Any) -> None:
    rows = shared_prompts(70, (5, 9))
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.3,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
    }
    torch.manual_seed(11)
    expected = generate(plain_model(), rows, max_new_tokens=12, **settings)
    torch.manual_seed(11)
    assert torch.equal(generate(model, rows, checkpoint_positions=[[70]] * 2, max_new_tokens=12, **settings), expected)
    torch.manual_seed(12)
    assert not torch.equal(generate(plain_model(), rows, max_new_tokens=12, **settings), expected)


def test_num_return_sequences_computes_a_prompt_once(model: Any) -> None:
    rows = shared_prompts(40, (5, 9))
    settings: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3}
    choices: tuple[list[list[int]], ...] = ([[40]] * 2, [[], []], [[40, 45], [49]])
    for positions in choices:
        ckpt_hf.clear(model)
        ckpt_hf.reset_stats(model)
        torch.manual_seed(3)
        expected = generate(plain_model(), rows, **settings)
        torch.manual_seed(3)
        assert torch.equal(generate(model, rows, checkpoint_positions=positions, **settings), expected)
        assert ckpt_hf.stats(model).computed_tokens == (45 + 9 if positions[0] == [40] else 45 + 49)


def test_ends_early_by_eos_and_fills_with_pads(model: Any) -> None:
    rows = shared_prompts(30, (5, 9, 2))
    greedy = new_tokens(generate(plain_model(), rows, max_new_tokens=10), rows)
    eos = [greedy[0][2], greedy[1][5], 197]
    expected = generate(plain_model(), rows, max_new_tokens=10, eos_token_id=eos)
    assert torch.equal(
        generate(model, rows, checkpoint_positions=[[30]] * 3, max_new_tokens=10, eos_token_id=eos), expected
    )
    assert expected[0, -1] == 0


@pytest.mark.parametrize("limits", [{"max_length": 60}, {"max_length": 60, "min_length": 55}, {"max_new_tokens": 1}])
def test_length_limits(model: Any, limits: dict[str, Any]) -> None:
    rows = shared_prompts(40, (5, 9))
    limits = {"max_new_tokens": None, "eos_token_id": 5} | limits
    expected = generate(plain_model(), rows, **limits)
    assert torch.equal(generate(model, rows, checkpoint_positions=[[40]] * 2, **limits), expected)


@pytest.mark.parametrize("build", [build_bpe, build_words])
@pytest.mark.parametrize("side", ["left", "right"])
def test_markers_in_text(build: Callable[[], Any], side: str) -> None:
    tokenizer = build()
    tokenizer.padding_side = side
    with patched_model("dense-2", tokenizer, VOCAB) as model:
        marker = tokenizer.convert_tokens_to_ids(MARKER)
        shared = "red shoes, size 41, leather; " * 3
        texts = [f"{shared}{MARKER} red shirts", f"{shared}{MARKER} of cotton {MARKER} and shorts", "the shore", shared]
        encoded = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        before = {name: tensor.clone() for name, tensor in encoded.items()}
        rows = [
            [t for t, shown in zip(ids, mask, strict=True) if shown and t != marker]
            for ids, mask in zip(encoded["input_ids"].tolist(), encoded["attention_mask"].tolist(), strict=True)
        ]
        expected = alone(plain_model("dense-2", VOCAB), rows)
        width = encoded["input_ids"].shape[1]
        for _ in range(2):
            with TokenSpy(model) as spy:
                result = model.generate(
                    **encoded, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.pad_token_id
                )
            assert marker not in spy.ids
            assert result[:, width:].tolist() == expected
            assert torch.equal(result[:, :width], encoded["input_ids"])
        assert all(torch.equal(before[name], encoded[name]) for name in before)


@pytest.mark.parametrize("at", [(0,), (20,), (10, 10), (0, 0, 7, 20, 20), (1,), (19,)], ids=str)
def test_markers_at_any_place(at: tuple[int, ...]) -> None:
    tokenizer = build_bpe()
    row = shared_prompts(20, (0,))[0]
    with patched_model("dense-2", tokenizer, VOCAB) as model, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        marker = tokenizer.convert_tokens_to_ids(MARKER)
        marked = place_markers(marker, row, *at)
        for _ in range(2):
            result = model.generate(torch.tensor([marked]), max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert result[0, : len(marked)].tolist() == marked
            assert [result[0, len(marked) :].tolist()] == alone(plain_model("dense-2", VOCAB), [row])
    odd = 0 in at or len(set(at)) < len(at)
    assert any(isinstance(w.message, CheckpointWarning) for w in caught) == odd

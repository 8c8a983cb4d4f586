"""The catalog task, its tokenizer, the shipped model, and ``python -m ckpt_hf``."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

import ckpt_hf
from ckpt_hf import __main__ as command
from ckpt_hf.demo import catalog, embedded, tokenizer, training_rule
from ckpt_hf.demo.architecture import make_config, make_model
from ckpt_hf.demo.batches import Steps, collate
from ckpt_hf.demo.compare import compare

SPLITS: tuple[catalog.Split, ...] = ("train", "heldout")
SPLIT_KEYS = ("type", "brand", "color", "material")
MAX_BYTES = 8_000_000

Loaded = tuple[Qwen3_5ForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def shipped() -> Loaded:
    return embedded.load_model()


def share_right(loaded: Loaded, pages: Sequence[catalog.Page]) -> float:
    """Share of right answers by ``generate`` of the unpatched model, end token included."""
    model, text_tokenizer = loaded
    right = total = 0
    for page in pages:
        prompts = [catalog.prompt(page, offer) for offer in page.offers]
        batch = text_tokenizer(prompts, return_tensors="pt", padding=True)
        out = model.generate(**batch, max_new_tokens=2, do_sample=False, pad_token_id=text_tokenizer.pad_token_id)
        given = text_tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
        right += sum(
            text == f" {offer.answer}{text_tokenizer.eos_token}" for text, offer in zip(given, page.offers, strict=True)
        )
        total += len(prompts)
    return right / total


# --- the task


def test_a_page_is_a_function_of_split_seed_and_index() -> None:
    assert catalog.make_page("train", 3, 7) == list(catalog.pages("train", 3, 8))[7]
    texts = {catalog.make_page(split, seed, index).text for split in SPLITS for seed in (0, 1) for index in (0, 1)}
    assert len(texts) == 8


def test_arguments_of_a_page_are_checked() -> None:
    with pytest.raises(ckpt_hf.CheckpointValueError, match="split must be"):
        catalog.make_page("test", 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ckpt_hf.CheckpointValueError, match="offers must be"):
        catalog.make_page("train", 0, 0, -1)


@pytest.mark.parametrize("split", SPLITS)
def test_an_offer_differs_in_what_its_answer_says_and_states_it(split: catalog.Split) -> None:
    for page in catalog.pages(split, 1, 100):
        for offer in page.offers:
            differing = [name for name in catalog.ATTRIBUTES if offer.product[name] != page.product[name]]
            assert differing == ([] if offer.answer == catalog.SAME else [offer.answer])
            if offer.changed is not None:
                assert offer.product[offer.answer] in offer.text.split(", ")[offer.changed]


def test_every_attribute_is_on_the_page() -> None:
    for page in catalog.pages("heldout", 2, 100, 0):
        assert all(value in page.text for value in page.product.values())


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_balanced(split: catalog.Split) -> None:
    counts = Counter(offer.answer for page in catalog.pages(split, 0, 400) for offer in page.offers)
    total = counts.total()
    # Bounds five standard deviations wide; the held-out split drops a few changes that have no neighbour in it.
    assert abs(counts[catalog.SAME] / total - 0.25) < 0.03
    assert all(abs(counts[name] / total - 0.075) < 0.02 for name in catalog.ATTRIBUTES)


def test_the_splits_share_no_combination_of_values() -> None:
    seen: dict[str, set[tuple[str, ...]]] = {}
    for split in SPLITS:
        products = [
            product
            for page in catalog.pages(split, 0, 400)
            for product in (page.product, *(offer.product for offer in page.offers))
        ]
        assert all(catalog.split_of(product) == split for product in products)
        seen[split] = {tuple(product[name] for name in SPLIT_KEYS) for product in products}
    assert not seen["train"] & seen["heldout"]


def test_an_offer_alone_tells_nearly_nothing() -> None:
    """Naive Bayes over the words of 32,000 offers gets hardly beyond always answering ``same``."""
    words: dict[str, Counter[str]] = defaultdict(Counter)
    answers: Counter[str] = Counter()
    for page in catalog.pages("train", 0, 2000):
        for offer in page.offers:
            answers[offer.answer] += 1
            words[offer.answer].update(offer.text.replace(",", "").split())
    vocabulary = set().union(*words.values())
    totals = {answer: counts.total() + len(vocabulary) for answer, counts in words.items()}

    def guess(text: str) -> str:
        known = [word for word in text.replace(",", "").split() if word in vocabulary]
        scores = {
            answer: math.log(answers[answer])
            + sum(math.log((words[answer][word] + 1) / totals[answer]) for word in known)
            for answer in answers
        }
        return max(scores, key=scores.__getitem__)

    offers = [offer for page in catalog.pages("heldout", 0, 100) for offer in page.offers]
    assert sum(guess(offer.text) == offer.answer for offer in offers) / len(offers) < 0.35


# --- the tokenizer


def test_the_shipped_tokenizer_is_the_one_that_the_catalog_gives(shipped: Loaded) -> None:
    built = tokenizer.build()
    assert built.backend_tokenizer.get_vocab() == shipped[1].backend_tokenizer.get_vocab()
    text = catalog.prompt(page := catalog.make_page("heldout", 9, 0), page.offers[0])
    assert built(text)["input_ids"] == shipped[1](text)["input_ids"]


def test_the_tokenizer_gives_back_any_text(shipped: Loaded) -> None:
    page = catalog.make_page("heldout", 4, 0)
    for text in (*(catalog.prompt(page, offer) for offer in page.offers), "naïve, 漢字 \t\n 12.5%", ""):
        assert shipped[1].decode(shipped[1](text)["input_ids"]) == text


def test_an_answer_is_one_token_and_numbers_are_several(shipped: Loaded) -> None:
    text_tokenizer = shipped[1]
    assert all(len(text_tokenizer(f" {answer}")["input_ids"]) == 1 for answer in catalog.ANSWERS)
    assert len(text_tokenizer.tokenize(" 10.5 l")) >= 4
    assert text_tokenizer.padding_side == "left"


def test_the_marker_is_not_in_the_vocabulary_and_changes_no_other_id() -> None:
    _, text_tokenizer = embedded.load_model()
    assert ckpt_hf.MARKER not in text_tokenizer.get_vocab()
    page = catalog.make_page("heldout", 5, 0)
    plain = [text_tokenizer(catalog.prompt(page, offer))["input_ids"] for offer in page.offers]
    marker = ckpt_hf.register_marker(text_tokenizer)
    for offer, expected in zip(page.offers, plain, strict=True):
        marked = text_tokenizer(catalog.prompt(page, offer, ckpt_hf.MARKER))["input_ids"]
        place = len(text_tokenizer(catalog.shared_text(page))["input_ids"])
        assert marked[place] == marker
        assert marked[:place] + marked[place + 1 :] == expected


# --- training


def test_batches_do_not_depend_on_the_order_of_asking(shipped: Loaded) -> None:
    steps = Steps(shipped[1], "train", seed=0, steps=3, rows=2, offers=3)
    late, early = steps[2], steps[0]
    again = Steps(shipped[1], "train", seed=0, steps=3, rows=2, offers=3)
    assert torch.equal(again[0].input_ids, early.input_ids) and torch.equal(again[2].input_ids, late.input_ids)
    with pytest.raises(IndexError):
        steps[3]


def test_a_batch_marks_answers_and_clauses(shipped: Loaded) -> None:
    text_tokenizer = shipped[1]
    pages = list(catalog.pages("train", 0, 3, 4))
    batch = collate(pages, text_tokenizer)
    ids = batch.input_ids.flatten()
    offers = [offer for page in pages for offer in page.offers]
    assert text_tokenizer.decode(ids[batch.answers]) == "".join(f" {offer.answer}<|endoftext|>" for offer in offers)
    assert set(text_tokenizer.decode(ids[batch.clauses])) == {",", "\n"}
    assert len(batch.clauses) == len(batch.changed) == sum(offer.text.count(", ") + 1 for offer in offers)
    assert batch.changed.sum() == sum(offer.answer != catalog.SAME for offer in offers)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_the_training_rule_agrees_with_transformers(tokens: int) -> None:
    """Values and gradients; keys that resemble each other and weak gates make the triangular system hard."""
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(2, tokens, 2, 32, generator=generator) + 0.7 for _ in range(2))
    v, weight = (torch.randn(2, tokens, 4, 32, generator=generator) for _ in range(2))
    g = -torch.rand(2, tokens, 4, generator=generator) * torch.tensor([0.01, 0.1, 1.0, 5.0])
    inputs = [x.requires_grad_() for x in (q, k, v, g, torch.rand(2, tokens, 4, generator=generator))]

    def values_and_gradients(rule: object) -> list[torch.Tensor]:
        output, _ = rule(*inputs[:3], g=inputs[3], beta=inputs[4], use_qk_l2norm_in_kernel=True)  # type: ignore[operator]
        return [output, *torch.autograd.grad((output * weight).sum(), inputs)]

    ours = values_and_gradients(training_rule.chunk_gated_delta_rule)
    theirs = values_and_gradients(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    for given, expected in zip(ours, theirs, strict=True):
        assert (given - expected).norm() <= 1e-5 * expected.norm() + 1e-7


def test_the_training_rule_is_taken_back(shipped: Loaded) -> None:
    model = make_model(make_config(shipped[1]))
    ids = torch.randint(2, 800, (2, 70), generator=torch.Generator().manual_seed(0))
    before = modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn
    expected = model(input_ids=ids, use_cache=False).logits
    with training_rule.training_rule():
        assert modeling_qwen3_5.causal_conv1d_fn is training_rule.causal_conv1d
        given = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    assert (modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn) == before


# --- the shipped model


def test_the_shipped_files_are_small() -> None:
    assert sum(path.stat().st_size for path in embedded.MODEL_DIRECTORY.iterdir()) <= MAX_BYTES


def test_the_shipped_configuration_hides_nothing(shipped: Loaded) -> None:
    config = shipped[0].config
    assert config.pad_token_id is None
    assert config.vocab_size == len(embedded.load_model()[1])  # the marker's id lies outside
    assert config.layer_types == ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    assert config.linear_num_value_heads == 2 * config.linear_num_key_heads


def test_the_shipped_model_answers_held_out_prompts(shipped: Loaded) -> None:
    assert embedded.training_report()["heldout_accuracy"] >= 0.95
    assert share_right(shipped, list(catalog.pages("heldout", 77, 10))) >= 0.95


def test_the_answer_depends_on_the_page(shipped: Loaded) -> None:
    """The same offers behind another page: the model can only be right by chance."""
    pages = list(catalog.pages("heldout", 78, 6))
    moved = [
        catalog.Page(other.text, other.product, page.offers)
        for page, other in zip(pages, pages[1:] + pages[:1], strict=True)
    ]
    assert share_right(shipped, moved) < 0.4


def test_missing_weights_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "MODEL_DIRECTORY", tmp_path)
    with pytest.raises(ckpt_hf.CheckpointRuntimeError, match=r"model\.safetensors"):
        embedded.load_model()


# --- python -m ckpt_hf


def test_checkpoints_change_no_answer_and_save_the_pages() -> None:
    model, text_tokenizer = embedded.load_model()
    pages = list(catalog.pages("heldout", 6, 3, 4))
    done: Counter[str] = Counter()
    plain, cold, warm = compare(model, text_tokenizer, pages, lambda name, count: done.update({name: count}))
    shared = [len(text_tokenizer(catalog.shared_text(page))["input_ids"]) for page in pages]
    assert set(done.values()) == {3} and len(done) == 3
    assert cold.differing == warm.differing == 0 and cold.accuracy == warm.accuracy == plain.accuracy
    assert plain.prompt_tokens == cold.prompt_tokens == warm.prompt_tokens == plain.computed_tokens
    assert cold.saved_tokens == 3 * sum(shared)
    assert warm.saved_tokens == 4 * sum(shared)
    assert "generate" not in vars(model), "compare leaves the model unpatched"


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--anchors", "2", "--candidates", "3", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert "2 catalog pages x 3 offers" in shown and "warm" in shown and "accuracy" in shown


def test_the_command_prints_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--anchors", "2", "--candidates", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["anchors"], result["candidates"]) == (2, 2)
    assert [entry["differing"] for entry in result["passes"]] == [0, 0, 0]
    assert result["passes"][1]["saved_tokens"] > 0


def test_differing_answers_are_an_error_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)

    def unsteady(*_: object) -> list[tuple[int, ...]]:
        return [(draw.randrange(100), 1) for _ in range(2)]

    monkeypatch.setattr("ckpt_hf.demo.compare._answers", unsteady)
    assert command.main(["--anchors", "2", "--candidates", "2", "--json"]) == 1


@pytest.mark.parametrize(
    "arguments", [["--anchors", "0"], ["--candidates", "-1"], ["--anchors", "x"], ["--device", "abacus"]]
)
def test_wrong_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err

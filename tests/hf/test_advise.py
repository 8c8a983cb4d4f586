"""Advice on boundaries: the tree of shared prefixes, the choice, seams, and what it all costs."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import BatchEncoding

from ckpt_hf.advice import Advice
from ckpt_hf.advise import advise
from ckpt_hf.boundary_choice import added_tokens, choose_boundaries, saved_tokens
from ckpt_hf.checkpoint_bytes import checkpoint_bytes
from ckpt_hf.encode import encode
from ckpt_hf.errors import CheckpointValueError
from ckpt_hf.markers import MARKER
from ckpt_hf.prefix_tree import SharedPrefix, shared_prefixes, sort_prompts
from ckpt_hf.runner import runner_of

from .models import build_model, generate, padded, patched_model, plain_model, random_ids, shared_prompts
from .tokenizers import marked, unmarked

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=14)


def tree_of(prompts: list[list[int]]) -> tuple[list[list[int]], list[SharedPrefix]]:
    order, common = sort_prompts(prompts)
    return [prompts[i] for i in order], shared_prefixes(common)


def computed_with(prompts: list[Any], boundaries: set[tuple[int, ...]]) -> int:
    """Tokens that run when the boundaries, given as whole prefixes, are kept for ever."""
    known: set[tuple[int, ...]] = set()
    total = 0
    for ids in prompts:
        own = [tuple(ids[:n]) for n in range(1, len(ids) + 1) if tuple(ids[:n]) in boundaries]
        total += len(ids) - max((len(prefix) for prefix in own if prefix in known), default=0)
        known.update(own)
    return total


def ask(prompts: Any, *args: Any, **kwargs: Any) -> Advice:
    return advise(prompts, *args, quiet=True, **kwargs)


class TestTree:
    @given(PROMPTS)
    def test_every_branching_point_is_found_once(self, prompts: list[list[int]]) -> None:
        rows, tree = tree_of(prompts)
        assert rows == sorted(prompts)
        counts = Counter(tuple(row[:n]) for row in rows for n in range(1, len(row) + 1))
        expected = {
            prefix: count
            for prefix, count in counts.items()
            if count > 1 and all(counts[(*prefix, token)] < count for token in range(3))
        }
        assert {tuple(rows[p.first][: p.tokens]): p.prompts for p in tree} == expected
        assert len(tree) == len(expected)

    @given(PROMPTS)
    def test_parents_come_first_and_hold_their_children(self, prompts: list[list[int]]) -> None:
        rows, tree = tree_of(prompts)
        for i, prefix in enumerate(tree):
            shorter = [p for p in tree if p.tokens < prefix.tokens and p.first <= prefix.first <= prefix.last <= p.last]
            assert prefix.parent is max(shorter, key=lambda p: p.tokens, default=None)
            assert prefix.parent is None or prefix.parent in tree[:i]
            assert all(child.parent is prefix for child in prefix.children)
        assert rows

    def test_ids_above_one_byte_are_ordered_as_numbers(self) -> None:
        assert sort_prompts([[256], [1], [2**32 - 1], [65536, 1]])[0] == [1, 0, 3, 2]


class TestChoice:
    @given(PROMPTS, st.integers(1, 6))
    def test_what_it_promises_is_what_a_cache_would_save(self, prompts: list[list[int]], min_saved: int) -> None:
        rows, tree = tree_of(prompts)
        kept = choose_boundaries(tree, min_saved, lambda prefix: 0)
        places = {tuple(rows[p.first][: p.tokens]) for p in kept}
        total = sum(map(len, prompts))
        assert total - computed_with(prompts, places) == sum(map(saved_tokens, kept))
        for prefix in kept:
            without = computed_with(prompts, places - {tuple(rows[prefix.first][: prefix.tokens])})
            assert without - computed_with(prompts, places) == added_tokens(prefix) >= min_saved

    @given(PROMPTS)
    def test_with_the_lowest_threshold_nothing_is_lost(self, prompts: list[list[int]]) -> None:
        rows, tree = tree_of(prompts)
        everywhere = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
        kept = choose_boundaries(tree, 1, lambda prefix: 0)
        total = sum(map(len, prompts))
        assert total - computed_with(prompts, everywhere) == sum(map(saved_tokens, kept))

    @given(PROMPTS, st.integers(0, 60))
    def test_the_cost_fits(self, prompts: list[list[int]], limit: int) -> None:
        _, tree = tree_of(prompts)

        def cost(prefix: SharedPrefix) -> int:
            return 10 + prefix.tokens - prefix.parent_tokens

        kept = choose_boundaries(tree, 1, cost, limit)
        assert sum(map(cost, kept)) <= limit

    def test_the_best_a_byte_stays(self) -> None:
        prompts = [[1] * 10 + [i] for i in range(2, 6)] + [[2] * 10 + [i] for i in range(3, 5)]
        _, tree = tree_of(prompts)
        (kept,) = choose_boundaries(tree, 1, lambda prefix: 100, 150)
        assert (kept.tokens, kept.prompts) == (10, 4)


class TestIds:
    def test_one_anchor(self) -> None:
        prompts = shared_prompts(300, [20, 30, 40, 50])
        (found,) = ask(prompts).boundaries
        assert (found.position, found.prompts, found.tokens_saved, found.starts_from) == (300, 4, 900, 0)
        assert (found.characters, found.tail, found.checkpoint_bytes, found.declared) == (None, None, None, 0)

    def test_a_chain(self) -> None:
        preamble = random_ids(200, 1)
        prompts = [
            preamble + random_ids(150, 10 + p) + random_ids(30, 100 + 9 * p + c) for p in range(5) for c in range(4)
        ]
        advice = ask(prompts)
        assert [(b.position, b.prompts, b.starts_from) for b in advice.boundaries] == [(200, 20, 0)] + [
            (350, 4, 200)
        ] * 5
        assert advice.tokens_saved == 19 * 200 + 5 * 3 * 150
        assert {b.example // 4 for b in advice.boundaries[1:]} == set(range(5))

    def test_equal_prompts_share_all_of_themselves(self) -> None:
        (found,) = ask([random_ids(300, 1)] * 3).boundaries
        assert (found.position, found.tokens_saved) == (300, 600)

    def test_callers_share_nothing(self) -> None:
        prompts = shared_prompts(300, [20, 30, 40, 50])
        apart = ask(prompts, salts=["a", "b", "a", "b"]).boundaries
        assert [(b.position, b.prompts, b.tokens_saved) for b in apart] == [(300, 2, 300)] * 2
        assert not ask(prompts, salts=list("abcd")).boundaries

    @pytest.mark.parametrize(("min_saved", "found"), [(900, 1), (901, 0)])
    def test_a_threshold(self, min_saved: int, found: int) -> None:
        advice = ask(shared_prompts(300, [20, 30, 40, 50]), min_saved=min_saved)
        assert len(advice.boundaries) == found

    def test_tensors_and_markers(self) -> None:
        tokenizer = marked("qwen")
        marker = tokenizer.convert_tokens_to_ids(MARKER)
        rows = shared_prompts(300, [20, 30, 40])
        prompts = [[*rows[0][:300], marker, *rows[0][300:]], torch.tensor(rows[1]), rows[2]]
        (found,) = ask(prompts, tokenizer).boundaries
        assert (found.position, found.prompts, found.declared) == (300, 3, 1)
        assert found.tail == tokenizer.decode(rows[0][284:300])[-48:]

    def test_a_tokenizer_s_batch_is_read_without_its_pads(self) -> None:
        rows = shared_prompts(300, [20, 30, 40, 50])
        ids, mask = padded(rows)
        want = ask(rows)
        assert ask(BatchEncoding({"input_ids": ids, "attention_mask": mask})) == want
        assert ask(BatchEncoding({"input_ids": ids.tolist(), "attention_mask": mask.tolist()})) == want
        assert ask(BatchEncoding({"input_ids": rows})) == want
        declared = {"input_ids": ids, "attention_mask": mask, "checkpoint_positions": torch.full((4, 1), 300)}
        assert [boundary.declared for boundary in ask(declared).boundaries] == [4]

    def test_following_the_advice_saves_what_it_says(self) -> None:
        rows = shared_prompts(90, [12, 20, 30, 40])
        (found,) = ask(rows, min_saved=64).boundaries
        with patched_model() as model:
            generate(model, rows, checkpoint_positions=[[found.position]] * len(rows))
            assert runner_of(model).stats.cached_tokens == found.tokens_saved


TEXTS = [f"A long page about shoes.\nLeather, size {size}, by hand.\n{{}}" for size in (41, 42)]


class TestText:
    @pytest.mark.parametrize("name", ["qwen", "bpe", "words"])
    def test_encode_puts_the_boundary_where_the_advice_is(self, name: str) -> None:
        tokenizer = unmarked(name)
        prompts = [text.format(f"candidate {c} of the same product") for text in TEXTS for c in range(6)]
        advice = ask(prompts, tokenizer, min_saved=8)
        assert advice.boundaries
        for found in advice.boundaries:
            assert found.characters is not None
            text = prompts[found.example]
            sharing = [p for p in prompts if p.startswith(text[: found.characters])]
            assert len(sharing) >= found.prompts
            parts = [[p[: found.characters], p[found.characters :]] for p in sharing]
            assert set(encode(tokenizer, parts)["checkpoint_positions"].flatten().tolist()) == {found.position}
            assert text[: found.characters].endswith(found.tail or "?")

    @pytest.mark.parametrize("name", ["qwen", "bpe", "unigram", "trimmed", "folding", "slow"])
    @pytest.mark.parametrize(
        "endings", [("red shoes", "red shirts", "red shore"), ("a\n", "a\n\n", "a b"), ("12", "123", "1")]
    )
    def test_the_boundary_holds_whatever_follows(self, name: str, endings: tuple[str, ...]) -> None:
        tokenizer = unmarked(name)
        prompts = [f"checkpoint the same product or another one? item {ending}" for ending in endings]
        shared = next(prompts[0][:n] for n in range(99, 0, -1) if all(p.startswith(prompts[0][:n]) for p in prompts))
        (found, *_) = sorted(ask(prompts, tokenizer, min_saved=1).boundaries, key=lambda b: b.position)
        rows = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        prefix = rows[found.example][: found.position]
        for following in ("zebra", "  x", "\n\n\nx", "9", "é", "shoe", "."):
            assert tokenizer(shared + following)["input_ids"][: found.position] == prefix

    def test_a_seam_costs_the_token_that_spans_it(self) -> None:
        tokenizer = unmarked("bpe")
        prompts = [f"red red red red sho{end}" for end in ("es are red", "es of leather", "es")]
        alone = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        shared = next(
            i for i, ids in enumerate(zip(*alone, strict=False)) if len(set(ids)) > 1 or i + 1 == len(alone[2])
        )
        (found,) = ask(prompts, tokenizer, min_saved=1).boundaries
        assert found.position <= shared + 1
        for end in ("es", "rts", "re"):
            assert tokenizer(f"red red red red shoes{end}")["input_ids"][: found.position] == alone[0][: found.position]

    def test_markers_in_texts_are_seen_and_do_not_change_the_ids(self) -> None:
        tokenizer = marked("qwen")
        prompts = [TEXTS[0].format(f"candidate {c} of the same product") for c in range(6)]
        cut = prompts[0].index("candidate")
        (plain,) = ask(prompts, tokenizer, min_saved=8).boundaries
        declared = [p[:cut] + MARKER + p[cut:] if i < 4 else p for i, p in enumerate(prompts)]
        (found,) = ask(declared, tokenizer, min_saved=8).boundaries
        assert (found.position, found.tail) == (plain.position, plain.tail)
        assert plain.declared == 0

    def test_a_marker_where_the_advice_is_counts_as_there_already(self) -> None:
        tokenizer = marked("qwen")
        prompts = [TEXTS[0].format(f"candidate {c} of the same product") for c in range(6)]
        (plain,) = ask(prompts, tokenizer, min_saved=8).boundaries
        cut = plain.characters
        assert cut is not None
        declared = [p[:cut] + MARKER + p[cut:] if i < 4 else p for i, p in enumerate(prompts)]
        (found,) = ask(declared, tokenizer, min_saved=8).boundaries
        assert (found.position, found.declared) == (plain.position, 4)


class TestBytes:
    @pytest.mark.parametrize("kind", ["dense-1", "dense-2", "moe-2"])
    @pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
    def test_a_model_and_its_configuration_agree_with_the_pools(self, kind: str, state_dtype: str) -> None:
        with patched_model(kind, state_dtype=state_dtype, verify=False) as model:
            runner = runner_of(model)
            runner.start()
            size = checkpoint_bytes(model, state_dtype)
            logits = model.config.vocab_size * 4
            memory = getattr(runner, "memory", runner)
            assert size.fixed - logits == memory.states.bytes_per_slot
            assert size.per_token == memory.kv.bytes_per_row
            assert checkpoint_bytes(build_model(kind).config, state_dtype) == size

    def test_half_precision_halves_all_but_the_states(self) -> None:
        model = build_model()
        full = checkpoint_bytes(model)
        half = checkpoint_bytes(model.to(torch.bfloat16))
        assert half.per_token * 2 == full.per_token and full.fixed / 2 < half.fixed < full.fixed

    def test_advice_tells_the_bytes_and_keeps_to_a_limit(self) -> None:
        rows = [row for seed, width in ((1, 300), (2, 200)) for row in shared_prompts(width, [20, 30, 40], seed=seed)]
        size = checkpoint_bytes(plain_model())
        advice = ask(rows, model=plain_model())
        assert [b.checkpoint_bytes for b in advice.boundaries] == [size.fixed + n * size.per_token for n in (300, 200)]
        assert advice.checkpoint_bytes == 2 * size.fixed + 500 * size.per_token
        limited = ask(rows, model=plain_model(), cache_bytes=advice.checkpoint_bytes - 1)
        assert [b.position for b in limited.boundaries] == [300]
        callers = ask(rows, model=plain_model(), cache_bytes=advice.checkpoint_bytes - 1, salts=list("aaabbb"))
        assert [b.position for b in callers.boundaries] == [300]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_prints_what_it_returns(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    prompts = [TEXTS[0].format(f"candidate [bold]{c}[/bold] of the same product") for c in range(6)]
    advice = advise(prompts, unmarked("qwen"), model=plain_model(), min_saved=8, console=console)
    text = console.export_text()
    assert f"{advice.tokens_saved:,}" in text and f"{advice.boundaries[0].position:,}" in text


def test_nothing_shared_says_so() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    assert not advise([random_ids(50, seed) for seed in range(9)], console=console).boundaries
    assert "9 prompts of 450 tokens: no boundary would save 256 tokens or more" in console.export_text()
    advise([random_ids(50, 0)], console=console)
    assert "1 prompt of 50 tokens" in console.export_text()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": "one text"}, "prompts"),
        ({"prompts": ["text"]}, "tokenizer"),
        ({"prompts": [[1, 2], []]}, "prompts"),
        ({"prompts": [[1, -2]]}, "prompts"),
        ({"prompts": [[1, 2.5]]}, "prompts"),
        ({"prompts": [7]}, "prompts"),
        ({"prompts": None}, "prompts must be an iterable .* got NoneType"),
        ({"prompts": 5}, "prompts must be an iterable .* got int"),
        ({"prompts": torch.tensor(5)}, "prompts must be an iterable .* got Tensor"),
        ({"prompts": [[2**40]]}, "prompts holds .* an id that is not from 0"),
        ({"prompts": {"ids": [[1]]}}, r"prompts as a batch must have input_ids, got \['ids'\]"),
        ({"prompts": {"input_ids": [[1]], "attention_mask": [[1, 1]]}}, "attention_mask of the shape of its input_ids"),
        ({"prompts": {"input_ids": [[1]], "attention_mask": 5}}, "attention_mask of the shape of its input_ids"),
        ({"prompts": {"input_ids": torch.ones(2)}}, "input_ids must have shape"),
        ({"prompts": [[1]], "salts": ["a", "b"]}, "salts"),
        ({"prompts": [[1]], "salts": 5}, "salts must be a sequence of str or None, got 5"),
        ({"prompts": [[1]], "salts": "a"}, "salts must be a sequence of str or None, got 'a'"),
        ({"prompts": [[1]], "salts": [[1]]}, "salts must be a sequence of str"),
        ({"prompts": [[1]], "min_saved": 0}, "min_saved"),
        ({"prompts": [[1]], "min_saved": float("nan")}, "min_saved must be an int of at least 1, got nan"),
        ({"prompts": [[1]], "min_saved": "x"}, "min_saved must be an int"),
        ({"prompts": [[1]], "min_saved": None}, "min_saved must be an int"),
        ({"prompts": [[1]], "cache_bytes": 5}, "cache_bytes"),
        ({"prompts": [[1]], "model": plain_model(), "cache_bytes": float("nan")}, "cache_bytes must be an int"),
        ({"prompts": [[1]], "model": plain_model(), "cache_bytes": -1}, "cache_bytes must be an int of at least 0"),
        ({"prompts": [[1]], "model": object()}, "model"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointValueError, match=match):
        ask(**arguments)


@settings(deadline=None, max_examples=30)
@given(PROMPTS, st.lists(st.sampled_from("ab"), min_size=14, max_size=14))
def test_the_whole_agrees_with_a_cache(prompts: list[list[int]], salts: list[str]) -> None:
    callers = salts[: len(prompts)]
    advice = ask(prompts, salts=callers, min_saved=2)
    computed = 0
    for caller in "ab":
        own = [ids for ids, salt in zip(prompts, callers, strict=True) if salt == caller]
        mine = [b for b in advice.boundaries if callers[b.example] == caller]
        computed += computed_with(own, {tuple(prompts[b.example][: b.position]) for b in mine})
    assert advice.tokens - computed == advice.tokens_saved

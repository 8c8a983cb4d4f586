"""Boundaries as data. Numbers in names are rows of the cases that users reported elsewhere.

What :func:`encode` promises, and what is tested here on random text:
1. the ids are those of the tokenizer's own call for the whole text;
2. the tokens before a boundary were made from the text before it alone, whatever follows;
3. unless characters join across the seam, no further token could be added to them;
4. rows of a batch that begin with the same text have the same boundary, and the same ids before it.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt_hf.encode import encode
from ckpt_hf.errors import CheckpointRuntimeError, CheckpointValueError, CheckpointWarning
from ckpt_hf.markers import MARKER, marker_id
from ckpt_hf.plain_text import without_marker

from .tokenizers import ALL, BYTE_LEVEL, build_bpe, build_words, marked, rows_of, token_bytes, unmarked

# "words" had the marker in its own vocabulary and "folding" was given it before we came: no unmarked twin to compare.
TWINS = [name for name in ALL if name not in ("words", "folding")]
SEAMS = ["red sho", "es", " ", "  ", "\n", "\n\n", "'", "s", "12", ".", "A", "</s>", "<think>", "<|im_end|>"]
SEAMS += ["checkpoint|>", MARKER]
JOINING = ["\u00e9", "e", "\u0301", "\u0323", "\u0338", "\u1100", "\u1161", "\u11a8", "\ufb01", "\u200b"]
LONG = ["\u4e2d", "\u6587", "\U0001f917", "\U0001f469\u200d\U0001f469\u200d\U0001f467"]  # several bytes a character
BITS = SEAMS + JOINING + LONG
text = st.lists(st.one_of(st.sampled_from(BITS), st.text(max_size=3)), max_size=6).map("".join)


def quiet_encode(tokenizer: Any, parts: Any, **arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        return encode(tokenizer, parts, **arguments)


def read_as(name: str, part: str) -> bytes:
    """What the tokens of a text stand for: Qwen's are made from NFC, its added tokens left out of that."""
    if name != "qwen":
        return part.encode()
    added = "|".join(re.escape(token.content) for token in unmarked(name).added_tokens_decoder.values())
    pieces = re.split(f"({added})", part)
    return "".join(piece if n % 2 else unicodedata.normalize("NFC", piece) for n, piece in enumerate(pieces)).encode()


@pytest.mark.parametrize("name", TWINS)
@settings(deadline=None, max_examples=60)
@given(parts=st.lists(text, min_size=1, max_size=4), specials=st.booleans())
def test_22_ids_are_those_of_the_whole_text(name: str, parts: list[str], specials: bool) -> None:
    plain = unmarked(name)
    expected = plain("".join(parts), add_special_tokens=specials)["input_ids"]
    assume(expected)
    for tokenizer in (plain, marked(name)):
        ((ids, _),) = rows_of(quiet_encode(tokenizer, parts, add_special_tokens=specials))
        assert ids == expected


@pytest.mark.parametrize("name", BYTE_LEVEL)
@settings(deadline=None, max_examples=150)
@given(shared=text, rest=text)
def test_22_tokens_before_a_boundary_come_from_the_shared_text_alone(name: str, shared: str, rest: str) -> None:
    tokenizer = marked(name)
    assume(shared + rest)
    ((ids, boundaries),) = rows_of(quiet_encode(tokenizer, [shared, rest], add_special_tokens=False))
    boundary = boundaries[0] if boundaries else 0
    before, whole = read_as(name, shared), read_as(name, shared + rest)
    assert before.startswith(token_bytes(tokenizer, ids[:boundary]))
    joins = not whole.startswith(before) or MARKER in shared + rest or "<" in shared + rest
    if name != "trimmed" and not joins and boundary < len(ids):
        assert len(token_bytes(tokenizer, ids[: boundary + 1])) > len(before)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=50)
@given(shared=text, rests=st.lists(text, min_size=2, max_size=4))
def test_rows_with_the_same_shared_text_share_ids_and_boundary(name: str, shared: str, rests: list[str]) -> None:
    tokenizer = marked(name)
    assume(all(tokenizer(shared + rest, add_special_tokens=False)["input_ids"] for rest in rests))
    rows = rows_of(quiet_encode(tokenizer, [[shared, rest] for rest in rests]))
    prefixes = {tuple(ids[:boundary]) for ids, boundaries in rows for boundary in boundaries}
    firsts = {prefix[:1] for prefix in prefixes}
    assert len(prefixes) <= 1 or len(firsts) > 1  # rows that differ from the first token on have nothing to share


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_no_boundary(name: str, side: str) -> None:
    tokenizer = marked(name)
    prompts = [["the red shoes", " fit the item", " or not"], ["a blue mug\n", "and another"], ["only text"]]
    batch = rows_of(encode(tokenizer, prompts, padding_side=side))
    assert batch == [rows_of(encode(tokenizer, prompt))[0] for prompt in prompts]
    assert [len(boundaries) for _, boundaries in batch] == [2, 1, 0]


@pytest.mark.parametrize("name", ALL)
def test_65_66_the_marker_in_a_text_is_plain_and_changes_no_seam(name: str) -> None:
    tokenizer = marked(name)
    parts = [f"red sho{MARKER}", f"es {MARKER}", f"{MARKER}"]
    before = tokenizer("".join(parts))["input_ids"]
    ((ids, boundaries),) = rows_of(encode(tokenizer, parts))
    assert marker_id(tokenizer) not in ids
    assert 1 <= len(boundaries) <= 2
    assert tokenizer("".join(parts))["input_ids"] == before
    assert marker_id(tokenizer) in before


def test_without_marker_keeps_ids_and_follows_later_changes() -> None:
    tokenizer = build_words()
    assert without_marker(tokenizer)(f"red <after> {MARKER}")["input_ids"][1] == tokenizer("<after>")["input_ids"][0]
    tokenizer.add_tokens(["<later>"])
    assert without_marker(tokenizer)("<later>")["input_ids"] == tokenizer("<later>")["input_ids"]
    assert without_marker(tokenizer).backend_tokenizer is without_marker(tokenizer).backend_tokenizer


def test_known_seams_of_the_qwen_vocabulary() -> None:
    tokenizer = marked("qwen")

    def boundary(*parts: str) -> tuple[list[str], list[int]]:
        ((ids, boundaries),) = rows_of(encode(tokenizer, list(parts)))
        return [tokenizer.decode([index]) for index in ids], boundaries

    assert boundary("red sho", "es") == (["red", " shoes"], [1])
    assert boundary("red shoes", ", size") == (["red", " shoes", ",", " size"], [2])
    assert boundary("red  ", "shoes") == (["red", " ", " shoes"], [2])
    assert boundary("cafe", "\u0301 noir") == (["ca", "f\u00e9", " noir"], [1])  # the accent joins the "e"
    assert boundary("a<|im_end|>", "\u0338b")[1] == [1]  # 2 would be right too: nothing joins to a special token
    assert boundary("🤗", "🤗")[1] == [3]  # three byte tokens each
    assert boundary("red shoes", "")[1] == [2]


def test_boundaries_of_several_parts_are_sorted_and_each_once() -> None:
    batch = encode(marked("qwen"), [["red", "", " sho", "es", " fit"], ["red shoes", " fit"]])
    assert batch["checkpoint_positions"].tolist() == [[1, 2], [2, -1]]
    assert batch["checkpoint_positions"].dtype == torch.int64
    assert batch.to("cpu")["checkpoint_positions"].shape == (2, 2)


@pytest.mark.parametrize("name", ALL)
def test_a_boundary_before_the_first_token_is_dropped_with_a_warning(name: str) -> None:
    with pytest.warns(CheckpointWarning, match="a checkpoint of prompt 1 was dropped"):
        batch = encode(marked(name), [["red shoes", " fit"], ["", "red shoes"]])
    assert rows_of(batch)[1][1] == []
    assert len(rows_of(batch)[0][1]) == 1


def test_lists_instead_of_tensors() -> None:
    batch = encode(marked("qwen"), [["red", " shoes"], ["a"]], return_tensors=None)
    assert batch["checkpoint_positions"] == [[1], [-1]]
    assert isinstance(batch["input_ids"][0], list)


def test_a_single_prompt_needs_no_pad_token() -> None:
    tokenizer = build_bpe()
    tokenizer.pad_token = None
    assert encode(tokenizer, ["red ", "mug"])["input_ids"].shape[0] == 1
    with pytest.raises(CheckpointValueError, match="tokenizer has no pad token"):
        encode(tokenizer, [["red ", "mug"], ["blue"]])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("red shoes", "parts must be a list"),
        ([], "parts must be a list"),
        (None, "parts must be a list"),
        ([["red"], []], "parts of a batch"),
        ([["red"], "shoes"], "parts of a batch"),
        (["red", ["shoes"]], "parts mixes strings"),
        ([["red", 1]], "parts mixes strings"),
        (["", ""], "prompt 0 gives no token"),
        ([["red"], [""]], "prompt 1 gives no token"),
    ],
)
def test_wrong_parts_are_named(parts: Any, message: str) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        encode(marked("qwen"), parts)


def test_a_model_that_makes_the_marker_from_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("ckpt_hf.encode"), "without_marker", lambda tokenizer: tokenizer)
    with pytest.raises(CheckpointRuntimeError, match="escape untrusted text"):
        encode(marked("bpe"), [f"red {MARKER}", "mug"])

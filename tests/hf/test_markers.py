"""Registering and escaping the marker. Numbers in names are rows of the cases that users reported elsewhere."""

from __future__ import annotations

import sys
import unicodedata
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ckpt_hf.errors import CheckpointValueError
from ckpt_hf.markers import MARKER, check_tokenizer, contains_marker, escape, marker_id, register_marker

from .tokenizers import ALL, BUILDERS, build_bpe, build_folding, marked, unmarked

WIDE = "\uff1c\uff5cmamba\uff3fcheckpoint\uff5c\uff1e"
DISGUISES = [
    MARKER,
    MARKER.upper(),
    WIDE,
    MARKER.replace("m", "m\u0301"),
    MARKER.replace("a", "\u200ba"),
    "≮" + MARKER[1:],
]
PIECES = sorted({MARKER[a:b] for a in range(len(MARKER)) for b in range(a + 1, len(MARKER) + 1)})

hostile = st.lists(
    st.one_of(st.sampled_from(PIECES), st.sampled_from(DISGUISES), st.sampled_from(list(WIDE)), st.text(max_size=3)),
    max_size=4,
).map("".join)
visible = hostile.filter(lambda text: any("!" <= character <= "~" for character in text))


def count(tokenizer: Any, text: str) -> int:
    return tokenizer(text, add_special_tokens=False)["input_ids"].count(marker_id(tokenizer))


@pytest.mark.parametrize("name", ALL)
def test_register_is_idempotent_and_changes_no_other_id(name: str) -> None:
    plain, tokenizer = unmarked(name), marked(name)
    index = marker_id(tokenizer)
    assert register_marker(tokenizer) == index
    assert tokenizer.convert_tokens_to_ids(MARKER) == index
    assert len(tokenizer) - len(plain) == (0 if marker_id(plain) is not None else 1)
    assert {k: v for k, v in tokenizer.get_vocab().items() if k != MARKER} == {
        k: v for k, v in plain.get_vocab().items() if k != MARKER
    }
    text = "red shoes <| of |> 中文 🤗"
    assert tokenizer(text)["input_ids"] == plain(text)["input_ids"]
    assert tokenizer(f"red{MARKER}mug", add_special_tokens=False)["input_ids"].count(index) == 1


def test_register_keeps_other_special_tokens() -> None:
    tokenizer = build_bpe()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<kept>"]})
    register_marker(tokenizer)
    assert tokenizer.extra_special_tokens == ["<kept>", MARKER]


def test_register_makes_an_ordinary_added_token_special() -> None:
    tokenizer = build_bpe()
    tokenizer.add_tokens([MARKER])
    index = tokenizer.get_added_vocab()[MARKER]
    assert register_marker(tokenizer) == index
    assert tokenizer.decode([index], skip_special_tokens=True) == ""


def test_register_survives_saving(tmp_path: Any) -> None:
    tokenizer = build_bpe()
    index = register_marker(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert marker_id(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == index


@pytest.mark.parametrize("wrong", ["Qwen/Qwen3.5-9B", None, object()])
def test_register_refuses_what_is_no_tokenizer(wrong: Any) -> None:
    with pytest.raises(CheckpointValueError, match="tokenizer must be"):
        register_marker(wrong)


def test_register_refuses_a_tokenizer_that_splits_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_bpe()
    monkeypatch.setattr(tokenizer, "add_special_tokens", lambda *arguments, **settings: 0)
    with pytest.raises(CheckpointValueError, match=r"does not read .* as one token"):
        register_marker(tokenizer)


@pytest.mark.parametrize("disguise", DISGUISES[1:])
def test_register_makes_the_match_exact(disguise: str) -> None:
    tokenizer = build_folding()
    assert count(tokenizer, disguise) == 1 and not contains_marker(disguise)
    register_marker(tokenizer)
    assert count(tokenizer, disguise) == 0 and count(tokenizer, MARKER) == 1


def test_contains_marker() -> None:
    assert contains_marker(f"a{MARKER}") and not contains_marker(escape(f"a{MARKER}"))


@settings(deadline=None, max_examples=400)
@given(before=hostile, text=visible, after=hostile)
def test_23_65_no_character_of_escaped_text_is_part_of_a_marker(before: str, text: str, after: str) -> None:
    assert (before + escape(text) + after).count(MARKER) == before.count(MARKER) + after.count(MARKER)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=60)
@given(before=hostile, text=visible, after=hostile)
def test_23_65_escaped_text_gives_no_marker_id(name: str, before: str, text: str, after: str) -> None:
    tokenizer = marked(name)
    assert count(tokenizer, before + escape(text) + after) == before.count(MARKER) + after.count(MARKER)


@settings(deadline=None, max_examples=200)
@given(text=visible)
def test_escaped_text_gives_no_marker_id_where_text_is_folded_first(text: str) -> None:
    tokenizer = unmarked("folding")  # not registered by us
    for size in range(1, len(MARKER)):
        assert count(tokenizer, MARKER[:size] + escape(text) + MARKER[size:]) == 0


@pytest.mark.parametrize("disguise", DISGUISES)
def test_disguised_markers_act_without_escaping_and_not_with_it(disguise: str) -> None:
    tokenizer = unmarked("folding")  # not registered by us
    assert count(tokenizer, disguise) == 1
    assert count(tokenizer, escape(disguise)) == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("role", ["mamba_checkpoint", "MAMBA_CHECKPOINT", "mamba_checkpoint|", "|mamba_checkpoint"])
def test_template_that_builds_a_token_from_a_field(name: str, role: str) -> None:
    left, right = MARKER.split(role.lower())
    assert count(marked(name), left + role.lower() + right) == 1
    assert count(marked(name), left + escape(role) + right) == 0


@settings(deadline=None, max_examples=200)
@given(cuts=st.sets(st.integers(1, len(MARKER) - 1)), known=st.integers(0, 3))
def test_pieces_escaped_one_by_one_never_make_a_marker(cuts: set[int], known: int) -> None:
    places = sorted({0, len(MARKER), *cuts})
    pieces = [MARKER[a:b] for a, b in pairwise(places)]
    own = "".join(pieces[:known]) if known < len(pieces) else ""
    tail = pieces[known:] if known < len(pieces) else pieces
    assert MARKER not in own + "".join(map(escape, tail))


@settings(deadline=None, max_examples=300)
@given(text=hostile)
def test_escape_only_adds_spaces_and_is_idempotent(text: str) -> None:
    escaped = escape(text)
    assert escaped.replace(" ", "") == text.replace(" ", "")
    assert escape(escaped) == escaped


@pytest.mark.parametrize(
    "text",
    ["", " ", "red shoes", "a < b | c > d.", "<div>\n", "<|im_end|>x", "naïve 中文 🤗", "state checkpoint", "mamba!"],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert escape(text) == text


def test_escape_keeps_what_stands_around_a_marker() -> None:
    assert escape(f"é{MARKER}ü{MARKER}.") == "é<| mamba_checkpoint|>ü<| mamba_checkpoint|>."


def test_escape_refuses_what_is_no_text() -> None:
    with pytest.raises(CheckpointValueError, match="text must be a str, got NoneType"):
        escape(None)  # type: ignore[arg-type]


def test_no_character_decomposes_to_a_bracket_of_the_marker_and_more() -> None:
    """A break can only be put between characters, so no single one may stand for the two around the break."""
    for code in range(sys.maxunicode + 1):
        visible_part = [c for c in unicodedata.normalize("NFKD", chr(code)) if unicodedata.category(c)[0] != "M"]
        assert len(visible_part) <= 1 or not set("<|") & set(visible_part), hex(code)


def test_check_tokenizer_lets_only_the_marker_lie_outside() -> None:
    size = len(unmarked("qwen"))
    check_tokenizer(marked("qwen"), size)
    with pytest.raises(
        CheckpointValueError, match=rf"not the model's: 1 of its ids .* up to {size - 1}.*{size - 1} are allowed"
    ):
        check_tokenizer(marked("qwen"), size - 1)
    with pytest.raises(CheckpointValueError, match="not the model's"):
        check_tokenizer(marked("qwen"), 1000)


def test_folding_builder_is_what_it_claims() -> None:
    assert set(BUILDERS) == set(ALL) and marker_id(build_folding()) is not None

"""How much of a text's tokens stays the same whatever follows the text."""

from __future__ import annotations

from typing import Any

from .seams import common_length, tokenized_texts

_CONTINUATIONS = ("a", "s", "A", " a", " ", "  ", "1", " 1", "\n", "\n\n", "\t", *".,:;-_'é中")
"""Beginnings of what may follow: a letter or digit that could join a word, spaces and lines that join others, signs."""


def stable_tokens(tokenizer: Any, text: str, ids: list[int]) -> int:
    """How many of ``ids``, which a longer text gave that begins with ``text``, are the same for every continuation."""
    continued = tokenizer([text + end for end in _CONTINUATIONS])["input_ids"]
    return min(common_length(ids, list(other)) for other in continued)


def end_of_token(tokenizer: Any, text: str, count: int) -> int | None:
    """Number of characters of ``text`` before the end of its first ``count`` tokens; None without offsets."""
    (row,) = tokenized_texts(tokenizer, tokenizer([text], return_attention_mask=True), [text], True)
    if row.ends is None or not row.first < count <= row.stop:
        return None
    return row.ends[count - row.first - 1]

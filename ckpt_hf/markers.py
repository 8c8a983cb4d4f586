"""The marker: registering it with a tokenizer, and keeping text that must not act as one from doing so.

The marker is a special token of the tokenizer only. Its id may lie outside the model's embedding, which is never
resized: the marker is stripped before the model sees a prompt (``prompts.py``).

This file imports no torch.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from tokenizers import AddedToken

from .errors import CheckpointValueError

MARKER = "<|mamba_checkpoint|>"

# A space is the one break that no common normaliser removes from within a text: zero-width characters are dropped
# by "clean text" normalisers, and full-width look-alikes turn into the ASCII characters under NFKC.
_BREAK = " "
_BREAK_AT = len("<|")
_PREFIXES = tuple(MARKER[:size] for size in range(1, len(MARKER)))
_SUFFIXES = tuple(MARKER[size:] for size in range(1, len(MARKER)))
_WHITESPACE_CONTROLS = "\t\n\r"
_ASCII_CONTROLS = {code: None for code in (*range(32), 127) if chr(code) not in _WHITESPACE_CONTROLS}


def register_marker(tokenizer: Any) -> int:
    """Add the marker to ``tokenizer`` as a special token and return its id.

    Idempotent: a tokenizer that has the marker keeps its id, and is only made to match the marker's own characters
    and nothing that a normaliser turns into them. No model is touched and no embedding resized, so the id may be equal
    to or larger than the model's vocabulary size.

    Raises:
        CheckpointValueError: ``tokenizer`` cannot take special tokens, or still does not read the marker as one token.
    """
    if marker_id(tokenizer) is None or MARKER not in tokenizer.all_special_tokens:
        tokenizer.add_special_tokens({"extra_special_tokens": [MARKER]}, replace_extra_special_tokens=False)
    elif tokenizer.added_tokens_decoder[marker_id(tokenizer)].normalized:
        tokenizer.add_tokens([AddedToken(MARKER, normalized=False, special=True)], special_tokens=True)
    registered = marker_id(tokenizer)
    read = list(tokenizer(MARKER, add_special_tokens=False, split_special_tokens=False)["input_ids"])
    if registered is None or read != [registered]:
        raise CheckpointValueError(
            f"tokenizer ({type(tokenizer).__name__}) does not read {MARKER!r} as one token after it was added; "
            "a tokenizer that keeps added special tokens whole is needed"
        )
    return registered


def marker_id(tokenizer: Any) -> int | None:
    """Return the marker's id in ``tokenizer``, or None if it is not registered there."""
    if not hasattr(tokenizer, "get_added_vocab") or not hasattr(tokenizer, "add_special_tokens"):
        raise CheckpointValueError(
            f"tokenizer must be a transformers tokenizer (not a processor or a string), got {type(tokenizer).__name__}"
        )
    found = tokenizer.get_added_vocab().get(MARKER)
    return None if found is None else int(found)


def contains_marker(text: str) -> bool:
    """Tell whether ``text`` holds the marker's characters, which the token of :func:`register_marker` matches."""
    return MARKER in text


def escape(text: str) -> str:
    """Return ``text`` such that no character of it can be part of a marker, whatever text is put before or after it.

    The text stays readable: a space is put into each occurrence of the marker, in front of a text that begins with
    the end of the marker (``"checkpoint|>..."``) or is nothing but a piece of it (``"mamba_checkpoint"`` for a
    template that writes ``"<|" + role + "|>"``), and behind a text that ends with the beginning of one. All other
    text is returned unchanged, and escaping twice changes nothing more.

    What counts as the marker's characters is decided after compatibility decomposition, case folding and removal of
    combining and invisible characters, so that the result holds also for tokenizers that normalise text before they
    look for special tokens. The empty text stays empty: what then meets is the caller's own text.

    Raises:
        CheckpointValueError: ``text`` is not a string.
    """
    if not isinstance(text, str):
        raise CheckpointValueError(f"text must be a str, got {type(text).__name__}")
    folded = _fold(text)
    if not folded:
        return text
    tail = _BREAK if folded.endswith(_PREFIXES) else ""
    lead = _BREAK if folded.startswith(_SUFFIXES) or (folded in MARKER and not tail) else ""
    if MARKER in folded:
        text = _break_markers(text, folded)
    return f"{lead}{text}{tail}"


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Check that every id which ``tokenizer`` can produce, the marker's aside, is below the model's ``vocab_size``.

    Raises:
        CheckpointValueError: some token's id lies outside the model's embedding.
    """
    marker_id(tokenizer)  # refuses what is not a tokenizer
    outside = {token: index for token, index in tokenizer.get_vocab().items() if index >= vocab_size}
    outside.pop(MARKER, None)
    if outside:
        token, index = max(outside.items(), key=lambda item: item[1])
        raise CheckpointValueError(
            f"tokenizer is not the model's: {len(outside)} of its ids lie outside the model's vocabulary, up to "
            f"{index} ({token!r}); ids below vocab_size {vocab_size} are allowed"
        )


def _fold(text: str) -> str:
    """Return the most that a tokenizer's normaliser could make of ``text``; folds character by character."""
    if text.isascii():
        return text.lower().translate(_ASCII_CONTROLS)
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    return "".join(character for character in decomposed if not _is_removable(character))


def _is_removable(character: str) -> bool:
    """Tell whether some normaliser drops ``character``: combining marks and controls, but not whitespace."""
    return unicodedata.category(character)[0] in "MC" and character not in _WHITESPACE_CONTROLS


def _break_markers(text: str, folded: str) -> str:
    """Put a break into each marker of ``folded``, at the place in ``text`` that it came from."""
    origins = [index for index, character in enumerate(text) for _ in _fold(character)]
    pieces, start = [], 0
    found = folded.find(MARKER)
    while found >= 0:
        cut = origins[found + _BREAK_AT]
        pieces.append(text[start:cut])
        start = cut
        found = folded.find(MARKER, found + len(MARKER))
    pieces.append(text[start:])
    return _BREAK.join(pieces)

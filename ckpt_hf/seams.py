"""Where a cut in a text falls among its tokens.

A tokenizer reads the whole text, so a token may span a cut. The boundary of a cut is then moved back, to the end of the
last token that comes from the text before the cut alone. Offsets of fast tokenizers tell which tokens those are, with
two exceptions in which they end too early: a normaliser that joins characters across the cut ("e" and a combining
accent become one character, whose offsets are those of the "e"), and post-processors that trim spaces from offsets.
In the first case the cut itself is moved back to where nothing joins. In the second, and for tokenizers without
offsets, the tokens before the boundary are those that the text before the cut gives when it is tokenised alone:
whatever follows the cut, they were made from nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import BatchEncoding

_JOINED = 8  # characters before a cut that are tried, each in a pass over the text, for one that nothing joins


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """One row of a tokenised batch without its pads.

    Attributes:
        text: what was tokenised.
        ids: its token ids, those that the tokenizer's template adds at either end included.
        first: how many of ``ids`` the template added in front; :attr:`stop` is where the text's own ids end.
        stop: see :attr:`first`.
        ends: for each of the text's own ids the index in ``text`` at which it ends; None without offsets.
    """

    text: str
    ids: list[int]
    first: int
    stop: int
    ends: list[int] | None


def tokenized_texts(tokenizer: Any, batch: BatchEncoding, texts: Sequence[str], template: bool) -> list[TokenizedText]:
    """Read the rows of ``batch``, the tokenizer's lists for ``texts``; ``template``: it was to add special tokens."""
    rows = []
    for row, text in enumerate(texts):
        real = [place for place, shown in enumerate(batch["attention_mask"][row]) if shown]
        ids = [batch["input_ids"][row][place] for place in real]
        if not batch.encodings:
            first, stop = _own_range(tokenizer, ids, text) if template else (0, len(ids))
            rows.append(TokenizedText(text, ids, first, stop, None))
            continue
        encoding = batch.encodings[row]
        sequences, offsets = encoding.sequence_ids, encoding.offsets
        own = [index for index, place in enumerate(real) if sequences[place] is not None]
        first, stop = (own[0], own[-1] + 1) if own else (len(ids), len(ids))
        rows.append(TokenizedText(text, ids, first, stop, [offsets[place][1] for place in real[first:stop]]))
    return rows


def token_boundaries(tokenizer: Any, row: TokenizedText, cuts: Sequence[int]) -> list[int]:
    """Return for each cut, an index in the row's text, the number of the row's ids before its boundary.

    0 where no token comes from the text before the cut alone, whatever the tokenizer's template puts in front.
    """
    stable = [None] * len(cuts) if row.ends is None else _stable_cuts(tokenizer.backend_tokenizer, row.text, cuts)
    boundaries = []
    for cut, place in zip(cuts, stable, strict=True):
        if not cut:
            count = 0
        elif place is not None and row.ends is not None:
            count = next((index for index, end in enumerate(row.ends) if end > place), len(row.ends))
        else:
            alone = tokenizer(row.text[:cut], add_special_tokens=False)["input_ids"]
            count = common_length(row.ids[row.first : row.stop], alone)
        boundaries.append(row.first + count if count else 0)
    return boundaries


def _stable_cuts(backend: Any, text: str, cuts: Sequence[int]) -> list[int | None]:
    """Return for each cut the last place up to it whose offsets can be trusted; None if there is none nearby."""
    if "trim_offsets=True" in str(backend.post_processor):
        return [None] * len(cuts)
    if backend.normalizer is None:
        return list(cuts)
    normalize = backend.normalizer.normalize_str
    whole = normalize(text)
    return [
        next(
            (place for place in range(cut, max(cut - _JOINED, 0), -1) if whole.startswith(normalize(text[:place]))),
            None,
        )
        for cut in cuts
    ]


def align_boundaries(rows: Sequence[TokenizedText], cuts: Sequence[Sequence[int]], boundaries: list[list[int]]) -> None:
    """Move back, in place, boundaries of rows that share the text before a cut to where their ids still agree.

    What follows a cut may move its boundary by a token in one row and not in the next. The shared text would then be
    computed once for each of the two positions.
    """
    groups: dict[str, list[tuple[int, int]]] = {}
    for row, row_cuts in enumerate(cuts):
        for place, cut in enumerate(row_cuts):
            if boundaries[row][place]:
                groups.setdefault(rows[row].text[:cut], []).append((row, place))
    for members in groups.values():
        row, place = members[0]
        agreed = boundaries[row][place]
        shared = rows[row].ids
        for other, other_place in members[1:]:
            agreed = common_length(shared[:agreed], rows[other].ids[: boundaries[other][other_place]])
        if agreed > max(rows[member].first for member, _ in members):
            for member, member_place in members:
                boundaries[member][member_place] = agreed


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items two sequences share from their start."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _own_range(tokenizer: Any, ids: list[int], text: str) -> tuple[int, int]:
    """Return where the text's own ids lie between those that the tokenizer's template adds."""
    own = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    for first in range(len(ids) - len(own) + 1):
        if ids[first : first + len(own)] == own:
            return first, first + len(own)
    return 0, 0

"""Training batches: pages followed by several offers with their answers, one page a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from ckpt_hf.demo import catalog

_TEXT, _CLAUSE_END, _ANSWER = 1, 2, 3
_LENGTH_MULTIPLE = 64  # few distinct shapes keep a GPU's allocator from fragmenting


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right.

    Args:
        input_ids: int64 ``[B, T]``.
        text: int64, places in the flattened ``input_ids`` of the offers' tokens, whose prediction teaches the model to
            look values up on the page.
        answers: int64, places of the answers and of the end tokens behind them.
        clauses: int64, places of the tokens that end the offers' clauses.
        changed: float32, one for each clause: 1 if it differs from the page, else 0.
    """

    input_ids: Tensor
    text: Tensor
    answers: Tensor
    clauses: Tensor
    changed: Tensor

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, which a device reads without waiting for its running work."""
        return Batch(*(tensor.pin_memory() for tensor in self._tensors()))

    def to(self, device: torch.device | str) -> Batch:
        """A copy on ``device``."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.input_ids, self.text, self.answers, self.clauses, self.changed


class Steps(Dataset[Batch]):
    """Item s is the batch of step s, a function of (seed, s) alone, whatever the number of loading processes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, split: catalog.Split, seed: int, steps: int, rows: int, offers: int
    ) -> None:
        self._tokenizer = tokenizer
        self._split, self._seed, self._steps, self._rows, self._offers = split, seed, steps, rows, offers

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < self._steps:
            raise IndexError(step)
        indices = range(step * self._rows, (step + 1) * self._rows)
        pages = [catalog.make_page(self._split, self._seed, index, self._offers) for index in indices]
        return collate(pages, self._tokenizer)


def collate(pages: list[catalog.Page], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """One row for each page, with all its offers: page, offer, answer, end, offer, answer, end, ..."""
    shared = tokenizer([catalog.shared_text(page) for page in pages])["input_ids"]
    offers = [offer for page in pages for offer in page.offers]
    questions = iter(tokenizer([catalog.question_text(offer) for offer in offers])["input_ids"])
    answers = iter(tokenizer([f" {offer.answer}{tokenizer.eos_token}" for offer in offers])["input_ids"])
    ends = {tokenizer.convert_tokens_to_ids(token) for token in tokenizer.tokenize(",\n")}
    rows, row_kinds, changed = [], [], []
    for page, ids in zip(pages, shared, strict=True):
        kinds = [0] * len(ids)
        for offer in page.offers:
            question, answer = next(questions), next(answers)
            ids = ids + question + answer
            kinds += [_CLAUSE_END if token in ends else _TEXT for token in question] + [_ANSWER] * len(answer)
            changed += [float(place == offer.changed) for place in range(offer.text.count(", ") + 1)]
        rows.append(ids)
        row_kinds.append(kinds)
    width = -(-max(map(len, rows)) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    kind = _rectangle(row_kinds, width).flatten()
    text = (kind == _TEXT) | (kind == _CLAUSE_END)
    text_places, answer_places, ends_of_clauses = (
        mask.nonzero()[:, 0] for mask in (text, kind == _ANSWER, kind == _CLAUSE_END)
    )
    return Batch(_rectangle(rows, width), text_places, answer_places, ends_of_clauses, torch.tensor(changed))


def _rectangle(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])

"""Training batches: pages followed by several offers with their answers, one page a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from ckpt_hf.demo import catalog


_TEXT, _ANSWER = 1, 2
_LENGTH_MULTIPLE = 64  # few distinct shapes keep a GPU's allocator from fragmenting


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right.

    Args:
        input_ids: int64 ``[B, T]``.
        text: int64, places in the flattened ``input_ids`` of the offers' tokens, whose prediction teaches the model to
            look values up on the page.
        answers: int64, places of the answers and of the end tokens behind them.
    """

    input_ids: Tensor
    text: Tensor
    answers: Tensor

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, which a device reads without waiting for its running work."""
        return Batch(self.input_ids.pin_memory(), self.text.pin_memory(), self.answers.pin_memory())

    def to(self, device: torch.device | str) -> Batch:
        """A copy on ``device``."""
        tensors = (self.input_ids, self.text, self.answers)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


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
    rows, all_kinds = [], []
    for page, ids in zip(pages, shared, strict=True):
        kinds = [0] * len(ids)
        for _ in page.offers:
            question, answer = next(questions), next(answers)
            ids = ids + question + answer
            kinds += [_TEXT] * len(question) + [_ANSWER] * len(answer)
        rows.append(ids)
        all_kinds.append(kinds)
    width = -(-max(map(len, rows)) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    kind = _rectangle(all_kinds, width).flatten()
    return Batch(_rectangle(rows, width), (kind == _TEXT).nonzero()[:, 0], (kind == _ANSWER).nonzero()[:, 0])


def _rectangle(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])

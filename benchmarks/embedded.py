"""The embedded model's ``generate`` on catalog pages with 16 offers each: unpatched, and with checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ckpt_hf
from benchmarks.measure import Timer, Timing
from benchmarks.tables import Row, make_rows
from ckpt_hf.demo import catalog
from ckpt_hf.demo.embedded import load_model

NEW_TOKENS = 4
TITLES = {
    "unpatched": "transformers, nothing shared",
    "cold": "checkpoints, page not seen before",
    "warm": "checkpoints, page already cached",
}


@dataclass(frozen=True, slots=True)
class Catalog:
    """The model, its tokenizer and held-out pages.

    Attributes:
        plain: for each page, the batch of its prompts without a marker.
        marked: the same prompts with the marker between page and offer.
    """

    model: Any
    tokenizer: Any
    plain: Sequence[Any]
    marked: Sequence[Any]

    def generate(self, batches: Sequence[Any]) -> list[Tensor]:
        """New tokens ``[offers, NEW_TOKENS]`` of each page, greedy; rows that end early are padded."""
        pad = self.tokenizer.pad_token_id
        answers = []
        for batch in batches:
            out = self.model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=pad)
            new = out[:, batch["input_ids"].shape[1] :]
            answers.append(torch.nn.functional.pad(new, (0, NEW_TOKENS - new.shape[1]), value=pad))
        return answers


def load_catalog(device: torch.device, pages: int, offers: int, seed: int) -> Catalog:
    """The shipped model on ``device`` in fp32, with tokenised prompts of held-out pages."""
    model, tokenizer = load_model(device)
    ckpt_hf.register_marker(tokenizer)
    drawn = list(catalog.pages("heldout", seed, pages, offers))

    def batches(marker: str) -> list[Any]:
        texts = [[catalog.prompt(page, offer, marker) for offer in page.offers] for page in drawn]
        return [tokenizer(group, return_tensors="pt", padding=True).to(device) for group in texts]

    return Catalog(model, tokenizer, batches(""), batches(ckpt_hf.MARKER))


def embedded_arms(work: Catalog) -> dict[str, Callable[[], list[Tensor]]]:
    """The arms by name; the patched ones run on a copy of the model, so that the other stays as it was."""
    patched = replace(work, model=ckpt_hf.patch(copy.deepcopy(work.model), work.tokenizer))

    def cold() -> list[Tensor]:
        ckpt_hf.clear(patched.model)
        return patched.generate(work.marked)

    return {
        "unpatched": lambda: work.generate(work.plain),
        "cold": cold,
        "warm": lambda: patched.generate(work.marked),
    }


def measure_embedded(timer: Timer, seed: int, pages: int = 4, offers: int = 16) -> tuple[list[Row], list[str]]:
    """Time the three arms on the same pages; rows in microseconds for all pages, and what was wrong.

    ``error`` is the share of answers that differ from the unpatched model's; an arm with any is not timed.
    """
    arms = embedded_arms(load_catalog(timer.device, pages, offers, seed))
    expected = torch.cat(arms["unpatched"]())
    results: dict[tuple[str, str], tuple[Timing, float]] = {}
    failures: list[str] = []
    for name, run in arms.items():
        differ = float((torch.cat(run()) != expected).any(1).float().mean())
        if differ:
            failures.append(f"{TITLES[name]}: {differ:.2%} of the answers differ from the unpatched model's")
            continue
        results[name, "eager"] = timer.eager(run), differ
    return make_rows(f"{pages} x {offers} offers", results, "unpatched"), failures

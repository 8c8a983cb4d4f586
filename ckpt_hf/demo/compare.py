"""The embedded model on catalog pages, three times: unpatched, with checkpoints, and with all pages already cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import BatchEncoding, PreTrainedTokenizerFast, Qwen3_5ForCausalLM

import ckpt_hf
from ckpt_hf.demo import catalog

_NEW_TOKENS = 3  # an answer, the end, and room to be wrong

Answer = tuple[int, ...]
Progress = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Pass:
    """All pages once.

    Attributes:
        name: what was run.
        accuracy: share of right answers.
        prompt_tokens: tokens of all prompts, without pads and markers.
        computed_tokens: those that ran through the model.
        seconds: time in ``generate``.
        differing: answers that are not the first pass's.
    """

    name: str
    accuracy: float
    prompt_tokens: int
    computed_tokens: int
    seconds: float
    differing: int

    @property
    def saved_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens


@dataclass(frozen=True, slots=True)
class _Run:
    answers: list[Answer]
    seconds: float


def compare(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pages: Sequence[catalog.Page],
    progress: Progress = lambda _name, _pages: None,
) -> list[Pass]:
    """Answer every page's offers, one ``generate`` call a page, and count what each way computes.

    Args:
        model: unpatched model; it is unpatched again on return.
        tokenizer: its tokenizer; the marker is registered with it.
        pages: held-out pages with their offers.
        progress: called with the pass's name and the number of pages done since the last call.

    Returns:
        The passes: unpatched, with checkpoints from an empty cache, and once more with every page cached.
    """
    plain = [_encode(tokenizer, page, "", model.device) for page in pages]
    prompt_tokens = sum(int(batch["attention_mask"].sum()) for batch in plain)
    _answers(model, tokenizer, plain[0])  # the first call of a process allocates and loads; it belongs to no pass
    first = _run(model, tokenizer, plain, "transformers", progress)
    passes = [_summary("transformers", first, first, tokenizer, pages, prompt_tokens, prompt_tokens)]
    ckpt_hf.patch(model, tokenizer, ckpt_hf.CheckpointConfig(cache_slots=len(pages)))
    try:
        marked = [_encode(tokenizer, page, ckpt_hf.MARKER, model.device) for page in pages]
        for name in ("checkpoints, cold", "checkpoints, warm"):
            ckpt_hf.reset_stats(model)
            run = _run(model, tokenizer, marked, name, progress)
            stats = ckpt_hf.stats(model)
            passes.append(_summary(name, run, first, tokenizer, pages, stats.prompt_tokens, stats.computed_tokens))
    finally:
        ckpt_hf.unpatch(model)
    return passes


def _encode(tokenizer: PreTrainedTokenizerFast, page: catalog.Page, marker: str, device: torch.device) -> BatchEncoding:
    prompts = [catalog.prompt(page, offer, marker) for offer in page.offers]
    return tokenizer(prompts, return_tensors="pt", padding=True).to(device)


def _run(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batches: Sequence[BatchEncoding],
    name: str,
    progress: Progress,
) -> _Run:
    answers: list[Answer] = []
    seconds = 0.0
    for batch in batches:
        started = time.perf_counter()
        answers += _answers(model, tokenizer, batch)
        seconds += time.perf_counter() - started
        progress(name, 1)
    return _Run(answers, seconds)


def _answers(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, batch: BatchEncoding) -> list[Answer]:
    """New tokens of each row, without pads; reading them waits for the device."""
    pad = tokenizer.pad_token_id
    out = model.generate(**batch, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=pad)
    rows = out[:, batch["input_ids"].shape[1] :].tolist()
    return [tuple(token for token in row if token != pad) for row in rows]


def _summary(
    name: str,
    run: _Run,
    first: _Run,
    tokenizer: PreTrainedTokenizerFast,
    pages: Sequence[catalog.Page],
    prompt_tokens: int,
    computed_tokens: int,
) -> Pass:
    texts = [f" {offer.answer}{tokenizer.eos_token}" for page in pages for offer in page.offers]
    expected = [tuple(ids) for ids in tokenizer(texts)["input_ids"]]
    right = sum(given == wanted for given, wanted in zip(run.answers, expected, strict=True))
    differing = sum(given != before for given, before in zip(run.answers, first.answers, strict=True))
    return Pass(name, right / len(expected), prompt_tokens, computed_tokens, run.seconds, differing)

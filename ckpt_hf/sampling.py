"""The decoding loop: transformers' own processors, criteria and streamers over packed steps.

The order of operations is that of transformers' sampling loop, so that the same logits, seed and settings give the
same tokens; only the forward is different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput

from .collector import Collector
from .export import export_cache
from .prompts import Prompt
from .requests import Request
from .runner import ModelRunner
from .stats import report_row


class MarkerSuppressor(LogitsProcessor):
    """Keeps the marker from being generated where the model's vocabulary has room for its id."""

    def __init__(self, marker: int) -> None:
        self.marker = marker

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B, V]`` without the marker."""
        scores[:, self.marker] = -torch.inf
        return scores


def marker_suppressors(marker: int | None, vocab_size: int) -> list[MarkerSuppressor]:
    """What keeps ``marker`` from being generated: nothing where the model has no row for it."""
    return [] if marker is None or marker >= vocab_size else [MarkerSuppressor(marker)]


@dataclass(frozen=True, slots=True)
class PackedCall:
    """What one ``generate`` call hands through transformers to the loop.

    Attributes:
        runner: the model's runner, locked by the caller.
        prompts: one a row of the caller's batch.
        salt: keeps this caller's checkpoints apart from others'.
        streamer: transformers' streamer or None.
        caller_ids: the caller's ids as they came, expanded like the batch when the loop starts.
    """

    runner: ModelRunner
    prompts: tuple[Prompt, ...]
    salt: str
    streamer: Any
    caller_ids: Tensor


def sample_packed(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    packed_call: PackedCall,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """transformers' decoding method for packed calls; see ``GenerationMixin.generate(custom_generate=...)``.

    Args:
        model: the patched model.
        input_ids: ``[B, L]`` stripped, left-padded and expanded prompts.
        logits_processor, stopping_criteria, generation_config: as transformers prepared them.
        packed_call: the rest of the call.

    Returns:
        Token ids ``[B, L + new]``, or transformers' output object when ``return_dict_in_generate`` is set.
    """
    runner = packed_call.runner
    copies = input_ids.shape[0] // len(packed_call.prompts)
    # Before the requests exist: a streamer may call generate, which runs all prompts that wait.
    if packed_call.streamer is not None:
        packed_call.streamer.put(packed_call.caller_ids.repeat_interleave(copies, dim=0).cpu())
    requests = _requests(packed_call, copies)
    loop = _DecodingLoop(requests, packed_call, logits_processor, stopping_criteria, generation_config)
    try:
        result = loop.run(input_ids)
    finally:
        runner.finish(requests)
    _count(packed_call, requests, loop.generated_tokens)
    return result


def _requests(call: PackedCall, copies: int) -> list[Request]:
    """One request a row; the rows that repeat one prompt share all of it."""
    with call.runner.lock:
        identity = call.runner.identity()
    requests = []
    for prompt in call.prompts:
        ends = len(prompt.token_ids)
        repeated = copies > 1 and ends not in prompt.boundaries
        boundaries = (*prompt.boundaries, ends) if repeated else prompt.boundaries
        ephemeral = frozenset({ends}) if repeated else frozenset()
        for _ in range(copies):
            requests.append(call.runner.new_request(prompt.token_ids, boundaries, identity, call.salt, ephemeral))
    return requests


def _count(call: PackedCall, requests: Sequence[Request], generated_tokens: int) -> None:
    copies = len(requests) // len(call.prompts)
    reports = [report_row(r, call.prompts[i // copies].notes) for i, r in enumerate(requests)]
    with call.runner.lock:
        stats = call.runner.stats
        stats.calls += 1
        stats.count(reports, generated_tokens)
        stats.last_rows = tuple(reports)


class _DecodingLoop:
    """One call's loop; rows advance together so that random numbers are drawn as transformers draws them."""

    def __init__(
        self,
        requests: list[Request],
        call: PackedCall,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
    ) -> None:
        self.requests = requests
        self.runner = call.runner
        self.call = call
        self.collector = Collector(call.runner)
        self.generated_tokens = 0
        self.ended: dict[Request, str] = {}
        self.logits_processor = logits_processor
        self.stopping_criteria = stopping_criteria
        self.config = generation_config
        self.returns_dict = generation_config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if self.returns_dict and generation_config.output_scores else None
        self.raw_logits: tuple[Tensor, ...] | None = (
            () if self.returns_dict and generation_config.output_logits else None
        )

    def run(self, input_ids: Tensor) -> GenerateDecoderOnlyOutput | Tensor:
        prompt_width = input_ids.shape[1]
        streamer = self.call.streamer
        # transformers pads rows that have ended only if it knows an end token; else all rows run until the last ends.
        pads_ended = any(hasattr(criterion, "eos_token_id") for criterion in self.stopping_criteria)
        unfinished = torch.ones(len(self.requests), dtype=torch.long, device=input_ids.device)
        with self.runner.lock:
            for request in self.requests:
                self.runner.add(request, self.collector)
        logits = torch.stack(self.collector.collect(self.requests))
        while True:
            next_tokens = self._choose(input_ids, logits, unfinished)
            input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
            if streamer is not None:
                streamer.put(next_tokens.cpu())
            running = unfinished.bool() if pads_ended else torch.ones_like(unfinished, dtype=torch.bool)
            unfinished = unfinished & ~self.stopping_criteria(input_ids, self.scores)
            runs_on = unfinished.bool() if pads_ended else unfinished.bool().any().expand_as(unfinished)
            tokens, was_running, runs = torch.stack([next_tokens, running, runs_on]).tolist()
            active = self._advance(tokens, was_running, runs, input_ids.shape[1])
            if not active:
                break
            decoded = torch.stack(self.collector.collect([self.requests[i] for i in active]))
            if len(active) == len(self.requests):
                logits = decoded
            else:
                logits[active] = decoded
        if streamer is not None:
            streamer.end()
        if not self.returns_dict:
            return input_ids
        starts = [prompt_width - r.prompt_tokens for r in self.requests]
        with self.runner.lock:
            cache = export_cache(self.runner, self.requests, starts, input_ids.shape[1] - 1)
            for request, reason in self.ended.items():
                self.runner.end(request, reason)
        return GenerateDecoderOnlyOutput(
            sequences=cast(Any, input_ids),
            scores=cast(Any, self.scores),
            logits=cast(Any, self.raw_logits),
            cache=cache,
        )

    def _choose(self, input_ids: Tensor, logits: Tensor, unfinished: Tensor) -> Tensor:
        next_logits = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = self.logits_processor(input_ids, next_logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.raw_logits is not None:
            self.raw_logits += (next_logits,)
        if self.config.do_sample:
            probabilities = torch.softmax(scores, dim=-1)
            next_tokens = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            next_tokens = torch.argmax(scores, dim=-1)
        if any(hasattr(criterion, "eos_token_id") for criterion in self.stopping_criteria):
            pad = self.config._pad_token_tensor.to(input_ids.device)
            next_tokens = next_tokens * unfinished + pad * (1 - unfinished)
        return next_tokens

    def _advance(self, tokens: list[int], was_running: list[int], runs: list[int], width: int) -> list[int]:
        """Give the rows that go on their tokens and end the others; the rows that go on."""
        active = []
        with self.runner.lock:
            for i, request in enumerate(self.requests):
                if not was_running[i]:
                    continue
                self.generated_tokens += 1
                if runs[i]:
                    self.runner.feed(request, tokens[i])
                    active.append(i)
                    continue
                self.ended[request] = self._reason(tokens[i], width)
                if not self.returns_dict:  # else once its keys and values have been handed out
                    self.runner.end(request, self.ended[request])
        return active

    def _reason(self, token: int, width: int) -> str:
        end_tokens = self.config._eos_token_tensor
        if end_tokens is not None and token in end_tokens.tolist():
            return "eos"
        return "length" if width >= self.config.max_length else "stop"

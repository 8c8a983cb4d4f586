"""Calls that the packed loop does not run: which they are, and how transformers' own ``generate`` gets them.

transformers can start from a checkpoint where every row of the batch has one at the same position and no row is
padded: its caches cannot hold rows of different lengths behind a shared prefix. Elsewhere it computes the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerationMode

from .collector import Collector
from .errors import CheckpointValueError
from .export import export_cache
from .prompts import Prompt
from .runner import ModelRunner

_OWN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_UNDERSTOOD_ARGUMENTS = ("attention_mask", "input_ids", "use_cache", "tokenizer", "logits_to_keep")


def reason_for_handover(
    model: Any, config: Any, mode: GenerationMode, custom_generate: Any, model_kwargs: Mapping[str, Any]
) -> str | None:
    """Why the packed loop cannot run this call, in a user's words; None when it can."""
    if custom_generate is not None:
        return "custom_generate is given"
    if mode is GenerationMode.BEAM_SEARCH:
        return "beam search needs rows of one length with a boundary at the same place"
    if mode not in _OWN_MODES:
        return f"the generation mode is {mode.value}"
    for name in _CACHE_ARGUMENTS:
        if model_kwargs.get(name) is not None:
            return f"{name} is given"
    if (unsupported := unsupported_setting(config)) is not None:
        return unsupported
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    if model.training:
        return "the model is in training mode"
    for name, value in model_kwargs.items():
        if name not in _UNDERSTOOD_ARGUMENTS and value is not None:
            return f"{name} is given"
    return None


def unsupported_setting(config: Any) -> str | None:
    """The setting of a prepared generation configuration that packed steps cannot serve, in a user's words."""
    if not config.use_cache:
        return "use_cache is False"
    if config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation is {config.cache_implementation!r}"
    for name in ("output_attentions", "output_hidden_states", "token_healing"):
        if getattr(config, name, None):
            return f"{name} is set"
    if (config.guidance_scale or 1) != 1:
        return "guidance_scale is set"
    return None


def check_aligned_arguments(model_kwargs: Mapping[str, Any], input_ids: Tensor) -> None:
    """Refuse tensors that go with the marked ids column by column: they cannot follow when the ids are stripped.

    Raises:
        CheckpointValueError: such an argument is given.
    """
    for name, value in model_kwargs.items():
        if name in _UNDERSTOOD_ARGUMENTS or not isinstance(value, Tensor):
            continue
        if name == "inputs_embeds" or input_ids.shape[1] in value.shape[1:]:
            raise CheckpointValueError(
                f"{name} of shape {tuple(value.shape)} is aligned with input_ids and cannot be combined with markers; "
                "leave it out, or pass unmarked ids and checkpoint_positions without it"
            )


def cache_from_checkpoint(
    runner: ModelRunner, prompts: Sequence[Prompt], mode: GenerationMode, num_beams: int, salt: str
) -> DynamicCache | None:
    """States of the deepest boundary that all rows share the position of, one row a beam.

    Returns:
        None where transformers cannot start from a checkpoint.
    """
    lengths = {len(prompt.token_ids) for prompt in prompts}
    common = set.intersection(*(set(prompt.boundaries) for prompt in prompts)) - lengths
    if mode is not GenerationMode.BEAM_SEARCH or len(lengths) != 1 or not common:
        return None
    boundary = max(common)
    with runner.lock:
        identity = runner.identity()
    requests = [
        runner.new_request(p.token_ids[:boundary], [b for b in p.boundaries if b <= boundary], identity, salt)
        for p in prompts
    ]
    collector = Collector(runner)
    try:
        for request in requests:
            runner.add(request, collector)
        collector.collect(requests)
        rows = [request for request in requests for _ in range(num_beams)]
        with runner.lock:
            return export_cache(runner, rows, [0] * len(rows), boundary)
    finally:
        runner.finish(requests)
        with runner.lock:
            runner.stats.prompt_tokens += sum(r.prompt_tokens for r in requests)
            runner.stats.cached_tokens += sum(r.cached_tokens for r in requests)
            runner.stats.computed_tokens += sum(r.computed_tokens for r in requests)


def strip_keeping_mask(
    input_ids: Tensor, attention_mask: Tensor, marker: int | None, pad_token_id: int | None
) -> tuple[Tensor, Tensor]:
    """Remove the markers from rows whose mask hides single tokens; left-pad what is left.

    Args:
        input_ids, attention_mask: ``[B, L]``.
        marker: id to remove.
        pad_token_id: fills the rows that had more markers than others.

    Returns:
        Ids and mask ``[B, L - fewest markers in a row]``.
    """
    kept: Tensor = input_ids != marker  # type: ignore[assignment]
    width = int(kept.sum(dim=1).max())
    ids = torch.full((len(input_ids), width), pad_token_id or 0, dtype=input_ids.dtype, device=input_ids.device)
    mask = torch.zeros_like(ids, dtype=attention_mask.dtype)
    for row, columns in enumerate(kept):
        count = int(columns.sum())
        ids[row, width - count :] = input_ids[row, columns]
        mask[row, width - count :] = attention_mask[row, columns]
    return ids, mask

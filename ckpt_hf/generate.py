"""``generate`` of a patched model: markers in, transformers' promises out."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMode, StopStringCriteria

from .errors import CheckpointValueError, CheckpointWarning
from .handover import cache_from_checkpoint, check_aligned_arguments, reason_for_handover, strip_keeping_mask
from .prompt_checks import check_prompts
from .prompts import InteriorPaddingError, Prompt, pad_prompts, read_prompts
from .runner import ModelRunner, runner_of
from .sampling import PackedCall, marker_suppressors, sample_packed
from .setting_checks import check_settings

_PACKED_MODE = GenerationMode.GREEDY_SEARCH
_POSITIONAL = tuple(inspect.signature(GenerationMixin.generate).parameters)[3:-1]


@torch.no_grad()
def generate(
    self: Any,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    *args: Any,
    checkpoint_positions: Any = None,
    checkpoint_salt: str = "",
    **kwargs: Any,
) -> Any:
    """transformers' ``generate``, starting from checkpoints where the prompts mark them.

    Args:
        inputs, generation_config, kwargs: as ``GenerationMixin.generate``. Prompts may contain the marker and may be
            padded on either side.
        checkpoint_positions: boundaries as data, int64 ``[B, K]`` padded with -1, or lists of ints: numbers of tokens
            before each boundary, pads and markers not counted. :func:`ckpt_hf.encode` makes them.
        checkpoint_salt: callers with different salts never share a checkpoint.

    Returns:
        What transformers returns for the prompts without their markers, except that the prompt part of each row is
        the caller's ids as they came.

    Raises:
        CheckpointValueError: a bad boundary, mask, id or prompt, or an argument that cannot go with markers.
    """
    kwargs |= dict(zip(_POSITIONAL, args, strict=False))
    runner = runner_of(self)
    input_ids = inputs if inputs is not None else kwargs.get("input_ids")
    if not _is_marked(input_ids, runner.marker, checkpoint_positions):
        return _stock(self, inputs=inputs, generation_config=generation_config, **kwargs)
    if input_ids is None:
        raise CheckpointValueError("input_ids is missing; checkpoints need token ids, inputs_embeds alone will not do")
    if inputs is None:  # given twice, transformers refuses them
        kwargs.pop("input_ids")
    if not isinstance(checkpoint_salt, str):
        raise CheckpointValueError(f"checkpoint_salt must be a str, got {type(checkpoint_salt).__name__}")
    with runner.call():
        return _generate_marked(
            self, runner, input_ids, generation_config, checkpoint_positions, checkpoint_salt, kwargs
        )


def _is_marked(input_ids: Any, marker: int | None, positions: Any) -> bool:
    if positions is not None:
        return True
    if marker is None or not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        return False
    return bool((input_ids == marker).any())


def _stock(model: Any, **kwargs: Any) -> Any:
    return type(model).generate(model, **kwargs)


def _generate_marked(
    model: Any,
    runner: ModelRunner,
    input_ids: Any,
    generation_config: Any,
    positions: Any,
    salt: str,
    kwargs: dict[str, Any],
) -> Any:
    check_settings(kwargs)
    config, model_kwargs = model._prepare_generation_config(generation_config, **kwargs)
    streamer, custom = model_kwargs.pop("streamer", None), model_kwargs.pop("custom_generate", None)
    for name in (*_POSITIONAL, "trust_remote_code", "assistant_tokenizer"):
        model_kwargs.pop(name, None)
    pad, mask = _padding(config, input_ids, kwargs.pop("attention_mask", None))
    reason: str | None
    try:
        prompts = read_prompts(
            input_ids, mask, marker_id=runner.marker, checkpoint_positions=positions, pad_token_id=pad
        )
        # Without any pad id the padding's content is free: the mask hides it.
        ids, mask = pad_prompts(prompts, pad or 0, input_ids.device)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        reason = reason_for_handover(model, config, mode, custom, model_kwargs)
    except InteriorPaddingError:
        if positions is not None:
            raise
        prompts, mode, reason = [], None, "attention_mask has zeros between real tokens"
        ids, mask = strip_keeping_mask(input_ids, mask, runner.marker, pad)
    check_aligned_arguments(model_kwargs, input_ids)
    check_prompts(model.config, [prompt.token_ids for prompt in prompts])
    _warn_notes(prompts)
    kwargs["logits_processor"] = _without_marker(model, runner, kwargs.get("logits_processor"))
    kwargs |= {"inputs": ids, "attention_mask": mask}
    if reason is None:
        for name in ("streamer", "custom_generate"):
            kwargs.pop(name, None)
        generation_config = _take_stop_strings(model, config, generation_config, kwargs)
        call = PackedCall(runner, tuple(prompts), salt, streamer, input_ids)
        result = _stock(
            model, generation_config=generation_config, custom_generate=sample_packed, packed_call=call, **kwargs
        )
    else:
        # Whatever else keeps the call from the packed loop (a cache of the caller's, a static one, none at all) also
        # keeps it from the cache made here.
        other = reason_for_handover(model, config, _PACKED_MODE, custom, model_kwargs)
        startable = prompts and other is None
        cache = cache_from_checkpoint(runner, prompts, mode, config.num_beams, salt) if startable else None
        _warn_handover(runner, other or reason, cache is not None)
        if cache is not None:
            kwargs["cache"] = cache
        result = _stock(model, generation_config=generation_config, **kwargs)
    return _with_callers_prompt(result, input_ids, ids.shape[1])


def _padding(config: Any, input_ids: Any, mask: Any) -> tuple[int | None, Any]:
    """The pad id, and the mask that transformers would infer where the caller gave none."""
    eos = config.eos_token_id
    eos_ids = [] if eos is None else (torch.as_tensor(eos).flatten().tolist())
    pad = config.pad_token_id
    if mask is None and pad is not None and pad not in eos_ids and isinstance(input_ids, Tensor):
        mask = (input_ids != pad).long()
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.is_floating_point():
        mask = (mask != 0).long()  # transformers takes 0.0 and 1.0 as well
    if pad is None and eos_ids:
        pad = eos_ids[0]
    return pad, mask


def _warn_notes(prompts: Sequence[Prompt]) -> None:
    for note in sorted({note for prompt in prompts for note in prompt.warnings}):
        warnings.warn(note, CheckpointWarning, stacklevel=5)


def _warn_handover(runner: ModelRunner, reason: str, from_checkpoint: bool) -> None:
    runner.stats.handed_over += 1
    if not from_checkpoint:
        warnings.warn(
            f"checkpoints are not used in this call because {reason}; the whole prompt is computed without its markers",
            CheckpointWarning,
            stacklevel=5,
        )


def _without_marker(model: Any, runner: ModelRunner, processors: Any) -> LogitsProcessorList:
    processors = LogitsProcessorList(processors or [])
    processors.extend(marker_suppressors(runner.marker, model.config.vocab_size))
    return processors


def _take_stop_strings(model: Any, config: Any, generation_config: Any, kwargs: dict[str, Any]) -> Any:
    """Build the criterion for ``stop_strings`` here: transformers loses the tokenizer on the way to a custom loop."""
    tokenizer = kwargs.pop("tokenizer", None)
    if config.stop_strings is None or tokenizer is None:
        return generation_config
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
    kwargs["stopping_criteria"] = criteria
    # An argument wins over both configs, also over stop strings in the model's own; transformers warns when a call
    # has arguments and a config, so a caller's config gets its copy.
    kwargs["stop_strings"] = None
    if generation_config is not None and model.generation_config.stop_strings is None:
        del kwargs["stop_strings"]
        generation_config = copy.deepcopy(generation_config)
        generation_config.stop_strings = None
    return generation_config


def _with_callers_prompt(result: Any, input_ids: Tensor, stripped_width: int) -> Any:
    """Put the caller's ids back where the stripped prompt stands."""
    sequences = result if isinstance(result, Tensor) else getattr(result, "sequences", None)
    if not isinstance(sequences, Tensor) or sequences.dim() != 2 or sequences.shape[0] % input_ids.shape[0]:
        return result
    prompt = input_ids.repeat_interleave(sequences.shape[0] // input_ids.shape[0], dim=0).to(sequences.device)
    restored = torch.cat([prompt, sequences[:, stripped_width:]], dim=1)
    if isinstance(result, Tensor):
        return restored
    result.sequences = restored
    return result

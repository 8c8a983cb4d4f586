"""One request's generation settings, prepared as ``generate`` prepares them for a batch of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    GenerationMode,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .errors import CheckpointError, CheckpointValueError
from .handover import unsupported_setting
from .sampling import MarkerSuppressor, marker_suppressors
from .setting_checks import callables, check_settings, equality_key, optional_callable

_ROWWISE_PROCESSORS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    SuppressTokensLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MarkerSuppressor,
)
"""transformers' processors that treat each row of scores by itself and never look at the tokens before."""
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_CACHED_SETTINGS = 256


@dataclass(frozen=True, slots=True, eq=False)
class RequestSettings:
    """How a request's tokens are chosen and when it ends.

    Attributes:
        do_sample: whether tokens are drawn; else the likeliest is taken.
        processors: transformers' logits processors.
        criteria: transformers' stopping criteria; None where ``eos`` and ``max_length`` say all.
        eos: end tokens.
        max_length: tokens of prompt and answer.
        group: equal for requests whose rows ``processors`` may treat as one batch; None for one with its own.
    """

    do_sample: bool
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList | None
    eos: frozenset[int]
    max_length: int
    group: object | None


@dataclass(frozen=True, slots=True)
class Extras:
    """What ``generate`` takes beside the configuration; each changes with its request, so it belongs to one alone."""

    logits_processor: Sequence[Any] = ()
    stopping_criteria: Sequence[Any] = ()
    prefix_allowed_tokens_fn: Callable[..., Any] | None = None

    @classmethod
    def read(cls, logits_processor: Any, stopping_criteria: Any, prefix_allowed_tokens_fn: Any) -> Extras:
        """Check them.

        Raises:
            CheckpointValueError: one is of another kind than ``generate`` takes.
        """
        return cls(
            callables("logits_processor", logits_processor),
            callables("stopping_criteria", stopping_criteria),
            optional_callable("prefix_allowed_tokens_fn", prefix_allowed_tokens_fn),
        )

    def __bool__(self) -> bool:
        return bool(self.logits_processor or self.stopping_criteria or self.prefix_allowed_tokens_fn)


class SettingsReader:
    """Turns a caller's settings into :class:`RequestSettings`; equal ones without extras are prepared once.

    Args:
        model: a patched model.
        tokenizer: for ``stop_strings``, or None.
        marker: id of the marker, which is never generated, or None.
    """

    def __init__(self, model: Any, tokenizer: Any, marker: int | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._marker = marker
        self._prepared: dict[Hashable, tuple[GenerationConfig, RequestSettings | None]] = {}

    def read(
        self, prompt: Sequence[int], config: GenerationConfig | None, overrides: Mapping[str, Any], extras: Extras
    ) -> RequestSettings:
        """Settings of a request with ``prompt`` (ids without markers).

        Raises:
            CheckpointValueError: a mode other than greedy search and sampling, an unknown argument, or what
                transformers refuses.
        """
        if config is not None and not isinstance(config, GenerationConfig):
            raise CheckpointValueError(
                f"generation_config must be a GenerationConfig or None, got {type(config).__name__}"
            )
        try:
            return self._read(prompt, config, overrides, extras)
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # Nothing of the caller's has been called: it is transformers that cannot do with a setting.
            raise CheckpointValueError(f"generation_config or a setting is wrong: {error}") from error

    def _read(
        self, prompt: Sequence[int], config: GenerationConfig | None, overrides: Mapping[str, Any], extras: Extras
    ) -> RequestSettings:
        given = {} if config is None else config.__dict__
        key = equality_key([given, self._model.generation_config.__dict__, dict(overrides)])
        prepared, shared = self._prepared.get(key, (None, None))
        if prepared is None:
            check_settings({**given, **overrides})
            prepared = self._prepare(config, overrides)
        if shared is not None and not extras:
            limit = self._with_lengths(prepared, len(prompt), config, overrides).max_length
            return RequestSettings(shared.do_sample, shared.processors, None, shared.eos, limit, shared.group)
        settings = self._build(prompt, self._with_lengths(prepared, len(prompt), config, overrides), extras)
        if len(self._prepared) >= _CACHED_SETTINGS:
            self._prepared.clear()
        if not extras and key is not None:
            self._prepared[key] = (prepared, settings if settings.group is not None else None)
        return settings

    def _prepare(self, config: GenerationConfig | None, overrides: Mapping[str, Any]) -> GenerationConfig:
        prepared, unknown = self._model._prepare_generation_config(config, **overrides)
        # First: transformers names some of these also as unknown.
        unsupported = unsupported_setting(prepared) or ("is_assistant is set" if prepared.is_assistant else None)
        if unsupported is not None:
            raise CheckpointValueError(f"generation_config is not for an engine: {unsupported}")
        if unknown:
            raise CheckpointValueError(f"{sorted(unknown)} are no generation settings; see GenerationConfig")
        mode = prepared.get_generation_mode(None)
        if mode not in _MODES:
            raise CheckpointValueError(
                f"generation_config asks for {mode.value}; an engine runs greedy search and sampling"
            )
        if (prepared.num_return_sequences or 1) != 1:
            raise CheckpointValueError("generation_config.num_return_sequences must be 1; submit the prompt repeatedly")
        self._model._prepare_special_tokens(prepared, True, device=self._model.device, batch_size=1)
        return prepared

    def _with_lengths(
        self, prepared: GenerationConfig, length: int, config: GenerationConfig | None, overrides: Mapping[str, Any]
    ) -> GenerationConfig:
        """A copy whose length limits count from a prompt of ``length`` tokens, as ``generate`` counts them."""
        defaults = self._model.generation_config

        def unset(name: str) -> bool:
            given = (overrides.get(name), getattr(config, name, None), getattr(defaults, name))
            return all(value is None for value in given)

        copied = copy.copy(prepared)
        copied = self._model._prepare_generated_length(
            generation_config=copied,
            has_default_max_length=unset("max_length"),
            has_default_min_length=unset("min_length"),
            model_input_name="input_ids",
            inputs_tensor=None,
            input_ids_length=length,
        )
        self._model._validate_generated_length(copied, length, unset("max_length"))
        return copied

    def _build(self, prompt: Sequence[int], config: Any, extras: Extras) -> RequestSettings:
        own = LogitsProcessorList(extras.logits_processor)
        own.extend(marker_suppressors(self._marker, self._model.config.vocab_size))
        processors = self._model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([list(prompt)], device=self._model.device),
            prefix_allowed_tokens_fn=extras.prefix_allowed_tokens_fn,
            logits_processor=own,
            device=self._model.device,
            model_kwargs={},
        )
        own_criteria = StoppingCriteriaList(extras.stopping_criteria)
        criteria = self._model._get_stopping_criteria(config, own_criteria, self._tokenizer)
        simple = all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)
        rowwise = simple and not extras and all(type(p) in _ROWWISE_PROCESSORS for p in processors)
        eos = config._eos_token_tensor
        return RequestSettings(
            config.do_sample,
            processors,
            None if simple else criteria,
            frozenset() if eos is None else frozenset(eos.tolist()),
            config.max_length,
            object() if rowwise else None,
        )

"""Checks of a request's generation settings before transformers sees them, and what makes two of them equal."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointValueError
from .integers import is_integer

_INTEGERS = (
    *("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "num_beams"),
    *("top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
_NUMBERS = (
    *("max_time", "temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"),
)
_FLAGS = ("do_sample", "renormalize_logits", "remove_invalid_values", "output_scores", "output_logits")
_ENDS = ("eos_token_id", "pad_token_id", "forced_eos_token_id")
_SEEDS = range(-(2**63), 2**64)
"""What torch's generators take."""
_PLAIN = (type(None), bool, int, str, torch.device, torch.dtype)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise CheckpointValueError for numbers, flags and end tokens that transformers would fail on, or quietly misread.

    Args:
        settings: generation settings by name; others than those that are checked here are left to transformers.
    """
    for name in _INTEGERS:
        value = settings.get(name)
        if value is not None and not is_integer(value):
            raise CheckpointValueError(f"{name} must be an integer or None, got {value!r}")
    for name in _NUMBERS:
        value = settings.get(name)
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__float__")):
            raise CheckpointValueError(f"{name} must be a number or None, got {value!r}")
    for name in _FLAGS:
        value = settings.get(name)
        if value is not None and not (isinstance(value, (int, np.bool_)) and value in (0, 1)):
            raise CheckpointValueError(f"{name} must be a bool or None, got {value!r}")
    for name in _ENDS:
        value = settings.get(name)
        if value is not None and not _are_ids(value):
            raise CheckpointValueError(f"{name} must be a token id, a sequence of at least one, or None, got {value!r}")


def callables(name: str, value: Any) -> Sequence[Any]:
    """``value`` as ``generate`` takes it: a list, maybe an empty one, of what can be called.

    Raises:
        CheckpointValueError: something else; left to the engine's thread, it would be an error of one step.
    """
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        hint = f"; put it into one: [{name}]" if callable(value) else ""
        raise CheckpointValueError(f"{name} must be a list of callables or None, got {type(value).__name__}{hint}")
    for position, item in enumerate(value):
        if not callable(item):
            raise CheckpointValueError(f"{name}[{position}] must be callable, got {type(item).__name__}")
    return value


def optional_callable(name: str, value: Any) -> Callable[..., Any] | None:
    """``value``, or CheckpointValueError unless it can be called or is None."""
    if value is not None and not callable(value):
        raise CheckpointValueError(f"{name} must be callable or None, got {type(value).__name__}")
    return cast(Callable[..., Any] | None, value)


def check_seed(seed: Any) -> None:
    """Raise CheckpointValueError unless ``seed`` is None or an integer that torch's generators take."""
    if seed is None:
        return
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise CheckpointValueError(f"seed must be an int, got {seed!r}")
    if seed not in _SEEDS:
        raise CheckpointValueError(f"seed must be from -2**63 to 2**64 - 1, got {seed}")


def equality_key(value: Any) -> Hashable | None:
    """Something that is equal for equal values alone, or None for what may differ unseen.

    Texts will not do: a long tensor's leaves numbers out, and an object's may be another one's at the same address.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex() if math.isfinite(value) else repr(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return kind, str(value.dtype), equality_key(value.tolist())
    if kind in (list, tuple):
        keys = [equality_key(item) for item in value]
    elif kind is dict:
        keys = [equality_key(part) for item in value.items() for part in item]
    else:
        return None
    return None if None in keys else (kind, *keys)


def _are_ids(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        value = value.tolist()
    ids = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return bool(ids) and all(is_integer(token) and -(2**63) <= operator.index(token) < 2**63 for token in ids)

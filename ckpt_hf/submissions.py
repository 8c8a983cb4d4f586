"""What a caller submits, checked and turned into ids, boundaries and settings in the caller's own thread."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from .errors import CheckpointValueError, CheckpointWarning
from .handles import Handle
from .prompt_checks import check_prompts
from .prompts import Prompt, read_prompt, read_prompts
from .request_settings import RequestSettings
from .setting_checks import check_seed


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """A request on its way to the engine's thread; one without settings is only computed, and its end pinned."""

    handle: Handle
    prompt: Prompt
    settings: RequestSettings | None
    seed: int | None
    salt: str
    priority: int
    keep_prompt: bool
    keep_answer: bool


class PromptReader:
    """Turns what callers hand over into :class:`~ckpt_hf.prompts.Prompt`.

    Args:
        config: the model's configuration.
        tokenizer: for prompts that are text, or None.
        marker: id of the marker, or None.
    """

    def __init__(self, config: Any, tokenizer: Any, marker: int | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._marker = marker

    def read(self, prompt: Any, checkpoint_positions: Any = None) -> Prompt:
        """One prompt: text, token ids in a sequence or in a tensor ``[L]`` or ``[1, L]``, or a :class:`Prompt`.

        Raises:
            CheckpointValueError: another type, an id that the model does not know, no tokens, or too many.
        """
        if isinstance(prompt, Prompt):
            if checkpoint_positions is not None:
                raise CheckpointValueError("checkpoint_positions must be None for a Prompt, which has boundaries")
            # As any other ids: one that is none would fail the forward for everybody in its step.
            read = replace(prompt, token_ids=tuple(self._ids(prompt.token_ids).tolist()))
            if min(read.token_ids) < 0:
                raise CheckpointValueError(f"prompt.token_ids holds the negative id {min(read.token_ids)}")
        else:
            read = read_prompt(self._ids(prompt), self._marker, checkpoint_positions)
        check_prompts(self._config, [read.token_ids])
        for note in read.warnings:
            warnings.warn(note, CheckpointWarning, stacklevel=4)
        return read

    def rows(self, prompts: Any) -> Iterator[Any]:
        """The prompts one by one; of a batch of :func:`ckpt_hf.encode` or of a tokenizer its rows."""
        if isinstance(prompts, (str, bytes)):
            raise CheckpointValueError("prompts must be an iterable of prompts; submit takes a single one")
        if isinstance(prompts, Mapping):
            unknown = sorted(set(prompts) - {"input_ids", "attention_mask", "checkpoint_positions"})
            if "input_ids" not in prompts or unknown:
                raise CheckpointValueError(
                    f"prompts as a batch has input_ids, attention_mask, checkpoint_positions; got {sorted(prompts)}"
                )
            ids, mask = prompts["input_ids"], prompts.get("attention_mask")
            positions = prompts.get("checkpoint_positions")
            return iter(read_prompts(ids, mask, marker_id=self._marker, checkpoint_positions=positions))
        try:
            return iter(prompts)
        except TypeError as error:
            raise CheckpointValueError(
                f"prompts must be an iterable of prompts or a batch of them, got {type(prompts).__name__}"
            ) from error

    def _ids(self, prompt: Any) -> np.ndarray:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise CheckpointValueError("prompt is text, which needs a tokenizer; give the Engine one or pass ids")
            prompt = self._tokenizer(prompt)["input_ids"]
            if not prompt:
                raise CheckpointValueError("prompt is text that gives no token; a prompt needs at least one")
        try:
            ids = np.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointValueError(f"prompt cannot be read as token ids: {error}") from error
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 1 or not len(ids):
            raise CheckpointValueError(
                f"prompt must be text or at least one token id (a sequence or a tensor [L]), got "
                f"{type(prompt).__name__} of shape {list(ids.shape)}"
            )
        if ids.dtype.kind not in "iu":
            raise CheckpointValueError(f"prompt must hold token ids (integers), got {ids.dtype}")
        return ids.astype(np.int64)


def check_options(salt: Any, priority: Any = 0, seed: Any = None, request_id: Any = None, **flags: Any) -> str:
    """Raise CheckpointValueError unless these are of the right kinds, ``flags`` bool or None; the salt as text."""
    if salt is not None and not isinstance(salt, str):
        raise CheckpointValueError(f"salt must be a str or None, got {type(salt).__name__}")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise CheckpointValueError(f"priority must be an int, got {priority!r}")
    check_seed(seed)
    if request_id is not None and not isinstance(request_id, str):
        raise CheckpointValueError(f"request_id must be a str or None, got {type(request_id).__name__}")
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise CheckpointValueError(f"{name} must be a bool or None, got {flag!r}")
    return salt or ""


def check_in_flight(in_flight: Any) -> None:
    """Raise CheckpointValueError unless it is a number of requests."""
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or in_flight < 1:
        raise CheckpointValueError(f"in_flight must be an int >= 1, got {in_flight!r}")


def request_names() -> Iterator[str]:
    """Names for requests that the caller gave none, as transformers' ``generate_batch`` numbers them."""
    return (f"req_{number}" for number in itertools.count())


def length_of(prompts: Any) -> int | None:
    """How many prompts there are, if that is known before they are read."""
    if isinstance(prompts, Mapping):
        return len(prompts["input_ids"]) if "input_ids" in prompts else None
    return len(prompts) if isinstance(prompts, Sequence) or hasattr(prompts, "__len__") else None

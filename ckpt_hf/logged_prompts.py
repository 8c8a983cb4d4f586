"""Prompts of a log: their token ids without markers, and the boundaries that they already have."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from .errors import CheckpointValueError
from .integers import is_integer
from .markers import MARKER, marker_id
from .prompts import read_prompts

_MAX_ID = 2**32


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """One prompt.

    Attributes:
        ids: token ids without markers.
        boundaries: the number of tokens before each marker.
        text: without markers; None for a prompt that is ids.
    """

    ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    text: str | None


def read_log(prompts: Iterable[Any], tokenizer: Any = None) -> list[LoggedPrompt]:
    """Read texts and sequences of ids (also tensors of one dimension), which may be mixed, or the rows of a batch.

    The ids of a text are those that the unmarked text gives, which is what boundaries as data go with.

    Raises:
        CheckpointValueError: no prompts, an empty one, a wrong type, a negative id, or text without a tokenizer.
    """
    if isinstance(prompts, str):
        raise CheckpointValueError("prompts must be a collection of prompts, got one str")
    marker = marker_id(tokenizer) if tokenizer is not None else None
    if isinstance(prompts, Mapping):
        prompts = _rows(prompts, marker)
    elif not isinstance(prompts, Iterable) or getattr(prompts, "ndim", None) == 0:
        raise CheckpointValueError(
            f"prompts must be an iterable of texts or token ids, or a tokenizer's batch, got {type(prompts).__name__}"
        )
    log = [_read(i, prompt, tokenizer, marker) for i, prompt in enumerate(prompts)]
    if not log:
        raise CheckpointValueError("prompts is empty; at least one prompt is needed")
    return log


def _rows(batch: Mapping[str, Any], marker: int | None) -> Iterable[Any]:
    """The prompts of a tokenizer's batch, or of :func:`ckpt_hf.encode`, without their pads."""
    if "input_ids" not in batch:
        raise CheckpointValueError(f"prompts as a batch must have input_ids, got {sorted(map(str, batch))}")
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if isinstance(ids, Tensor):
        read = read_prompts(ids, mask, marker_id=marker, checkpoint_positions=batch.get("checkpoint_positions"))
        return [LoggedPrompt(prompt.token_ids, prompt.boundaries, None) for prompt in read]
    if mask is None:
        return cast(Iterable[Any], ids)
    try:
        return [
            [token for token, real in zip(row, kept, strict=True) if real] for row, kept in zip(ids, mask, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise CheckpointValueError(
            f"prompts as a batch must have an attention_mask of the shape of its input_ids: {error}"
        ) from error


def _read(index: int, prompt: Any, tokenizer: Any, marker: int | None) -> LoggedPrompt:
    if isinstance(prompt, LoggedPrompt):
        return prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise CheckpointValueError(f"prompts holds text at {index}, which needs a tokenizer")
        parts = prompt.split(MARKER)
        text = "".join(parts)
        ids = _ids(index, tokenizer(text)["input_ids"])
        return LoggedPrompt(ids, _declared(tokenizer, ids, parts), text)
    ids = _ids(index, prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    at = [i - before for before, i in enumerate(i for i, token in enumerate(ids) if token == marker)]
    kept = tuple(token for token in ids if token != marker)
    if not kept:
        raise CheckpointValueError(f"prompts holds no token but markers at {index}")
    return LoggedPrompt(kept, tuple(at), None)


def _declared(tokenizer: Any, ids: tuple[int, ...], parts: Sequence[str]) -> tuple[int, ...]:
    """Tokens before each marker of a text, as far as they are also the unmarked text's."""
    found, start = [], ""
    for part in parts[:-1]:
        start += part
        alone = tokenizer(start, add_special_tokens=False)["input_ids"]
        lead = next((i for i in range(len(ids)) if list(ids[i : i + len(alone)]) == list(alone)), None)
        if alone and lead is not None:
            found.append(lead + len(alone))
    return tuple(found)


def _ids(index: int, values: Any) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise CheckpointValueError(
            f"prompts must hold texts or sequences of token ids, got {type(values).__name__} at {index}"
        )
    if not all(map(is_integer, values)):
        raise CheckpointValueError(f"prompts holds something other than token ids at {index}")
    ids = tuple(map(operator.index, values))
    if not ids or min(ids) < 0 or max(ids) >= _MAX_ID:
        raise CheckpointValueError(f"prompts holds an empty prompt or an id that is not from 0 to 2**32 - 1 at {index}")
    return ids

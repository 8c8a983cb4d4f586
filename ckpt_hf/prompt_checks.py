"""Checks of the tensors that a caller hands over with a batch of prompts; each error names the argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .errors import CheckpointValueError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_ids(input_ids: Any) -> None:
    """Raise CheckpointValueError unless ``input_ids`` is an integer tensor ``[B, L]``."""
    if not isinstance(input_ids, Tensor):
        raise CheckpointValueError(f"input_ids must be a tensor [B, L], got {type(input_ids).__name__}")
    if input_ids.dim() != 2 or input_ids.shape[0] == 0:
        raise CheckpointValueError(f"input_ids must have shape [B, L] with B >= 1, got {list(input_ids.shape)}")
    if input_ids.dtype not in _INTEGERS:
        raise CheckpointValueError(f"input_ids must hold integers (torch.int64), got {input_ids.dtype}")
    if input_ids.device.type == "meta":
        raise CheckpointValueError("input_ids is on the meta device and holds no values; a real device is needed")


def check_mask(mask: Any, input_ids: Tensor) -> None:
    """Raise CheckpointValueError unless ``mask`` is None or 0s and 1s in the shape and place of ``input_ids``."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise CheckpointValueError(f"attention_mask must be a tensor [B, L] or None, got {type(mask).__name__}")
    if mask.shape != input_ids.shape:
        raise CheckpointValueError(
            f"attention_mask must have the shape of input_ids {list(input_ids.shape)}, got {list(mask.shape)}; "
            "masks with one row a query (3-D, 4-D) are not supported"
        )
    if mask.dtype != torch.bool and mask.dtype not in _INTEGERS:
        raise CheckpointValueError(f"attention_mask must hold integers 0 and 1 or bool, got {mask.dtype}")
    if mask.device != input_ids.device:
        raise CheckpointValueError(f"attention_mask is on {mask.device}, input_ids on {input_ids.device}; move one")


def check_positions(positions: Any, input_ids: Tensor) -> Tensor | list[list[int]]:
    """Return the positions as a tensor ``[B, K]`` or as B lists of ints."""
    batch = input_ids.shape[0]
    if positions is None:
        return [[] for _ in range(batch)]
    if not isinstance(positions, Tensor):
        return _position_lists(positions, batch)
    if positions.dtype not in _INTEGERS:
        raise CheckpointValueError(f"checkpoint_positions must hold integers (torch.int64), got {positions.dtype}")
    if positions.dim() == 1 and batch == 1:
        positions = positions[None]
    if positions.dim() != 2 or positions.shape[0] != batch:
        raise CheckpointValueError(
            f"checkpoint_positions must have shape [B, K] with B = {batch} as input_ids, got {list(positions.shape)}"
        )
    if positions.device != input_ids.device and positions.device.type != "cpu":
        raise CheckpointValueError(
            f"checkpoint_positions is on {positions.device}, input_ids on {input_ids.device}; move it there or to the "
            "CPU"
        )
    return cast(Tensor, positions)


def check_prompts(config: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Raise CheckpointValueError unless each prompt's ids and length suit a model of ``config``."""
    vocabulary, positions = config.vocab_size, config.max_position_embeddings
    for row, token_ids in enumerate(prompts):
        if max(token_ids) >= vocabulary:
            raise CheckpointValueError(
                f"input_ids row {row} holds id {max(token_ids)}; the model's vocabulary has {vocabulary} ids"
            )
        if len(token_ids) > positions:
            raise CheckpointValueError(
                f"input_ids row {row} has {len(token_ids)} tokens; the model has {positions} positions "
                "(max_position_embeddings)"
            )


def _position_lists(positions: Any, batch: int) -> list[list[int]]:
    if isinstance(positions, (str, bytes)) or not isinstance(positions, Iterable):
        raise CheckpointValueError(
            f"checkpoint_positions must be a tensor, a sequence of sequences or None, got {type(positions).__name__}"
        )
    rows = list(positions)
    if batch == 1 and not any(_is_row(row) for row in rows):
        rows = [rows]
    if len(rows) != batch:
        raise CheckpointValueError(
            f"checkpoint_positions must have one row for each of the {batch} rows of input_ids, got {len(rows)}"
        )
    try:
        return [[_index(value) for value in row] for row in rows]
    except TypeError as error:
        raise CheckpointValueError(
            f"checkpoint_positions must be {batch} sequences of integers, or a flat one for a single row: {error}"
        ) from error


def _is_row(value: Any) -> bool:
    return isinstance(value, Iterable) and not (isinstance(value, Tensor) and value.dim() == 0)


def _index(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is not a position")
    return operator.index(value)

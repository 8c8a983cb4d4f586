"""From a batch as the caller made it to what the model may see: token ids without pads and markers, and boundaries.

A boundary is a number of tokens, counted over real tokens only: neither pads nor markers count. The caller's tensors
are never written to.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .errors import CheckpointValueError

_NO_POSITION = -1
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class InteriorPaddingError(CheckpointValueError):
    """``attention_mask`` hides tokens between tokens that it shows, so the row is not one run of tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a batch as the model sees it.

    Attributes:
        token_ids: the ids without pads and markers, at least one.
        boundaries: checkpoints as the number of tokens before each; strictly increasing, in 1..len(token_ids).
        notes: what was odd about the markers or positions, in words for the user.
    """

    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_prompts(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    marker_id: int | None,
    checkpoint_positions: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    pad_token_id: int | None = None,
) -> list[Prompt]:
    """Read the prompts of a batch with one copy from the device.

    Args:
        input_ids: ``[B, L]`` integers, pads on either or both sides where ``attention_mask`` is 0.
        attention_mask: ``[B, L]`` integers 0 or 1, or bool, on the same device. None: every id is real.
        marker_id: the id that marks a checkpoint; None if no tokenizer with a marker is known. Markers within the
            padding are ignored; a marker between real tokens counts even if the mask hides it.
        checkpoint_positions: further boundaries as data: ``[B, K]`` integers padded with -1 (on the host or on the
            device of ``input_ids``), B sequences of integers, or one flat sequence if B is 1.
        pad_token_id: only to refuse a batch without a mask whose pads could not be told from markers.

    Returns:
        One :class:`Prompt` a row. A boundary before the first token is dropped and noted, a repeated one counts once
        and is noted, and so is one at the prompt's end, which is kept.

    Raises:
        InteriorPaddingError: the mask is 0 between real tokens, at something other than a marker.
        CheckpointValueError: a wrong type, shape, dtype, device or value of an argument, or an empty prompt.
    """
    _check_ids(input_ids)
    _check_mask(attention_mask, input_ids)
    if attention_mask is None and marker_id is not None and marker_id == pad_token_id:
        raise CheckpointValueError(
            f"pad_token_id {pad_token_id} is the marker's id, so pads cannot be told from markers; "
            "give an attention_mask or use another pad token"
        )
    positions = _check_positions(checkpoint_positions, input_ids)
    rows, masks, position_rows = _to_host(input_ids, attention_mask, positions)
    return [
        _read_row(index, ids, mask, wanted, marker_id)
        for index, (ids, mask, wanted) in enumerate(zip(rows, masks, position_rows, strict=True))
    ]


def pad_prompts(
    prompts: Sequence[Prompt], pad_token_id: int | None, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return the stripped prompts as a left-padded batch: ``input_ids`` and ``attention_mask``, int64 ``[B, L]``.

    Raises:
        CheckpointValueError: no prompts, or prompts of different lengths and no ``pad_token_id``.
    """
    if not prompts:
        raise CheckpointValueError("prompts is empty; at least one prompt is needed")
    lengths = [len(prompt.token_ids) for prompt in prompts]
    width = max(lengths)
    if pad_token_id is None and min(lengths) < width:
        raise CheckpointValueError(
            f"pad_token_id is None but the prompts have {min(lengths)} to {width} tokens; give a pad token's id"
        )
    pad = 0 if pad_token_id is None else pad_token_id
    ids = [[pad] * (width - size) + list(prompt.token_ids) for size, prompt in zip(lengths, prompts, strict=True)]
    mask = [[0] * (width - size) + [1] * size for size in lengths]
    both = torch.tensor([ids, mask], dtype=torch.int64).to(device)
    return both[0], both[1]


def _check_ids(input_ids: Any) -> None:
    if not isinstance(input_ids, Tensor):
        raise CheckpointValueError(f"input_ids must be a tensor [B, L], got {type(input_ids).__name__}")
    if input_ids.dim() != 2 or input_ids.shape[0] == 0:
        raise CheckpointValueError(f"input_ids must have shape [B, L] with B >= 1, got {list(input_ids.shape)}")
    if input_ids.dtype not in _INTEGERS:
        raise CheckpointValueError(f"input_ids must hold integers (torch.int64), got {input_ids.dtype}")
    if input_ids.device.type == "meta":
        raise CheckpointValueError("input_ids is on the meta device and holds no values; a real device is needed")


def _check_mask(mask: Any, input_ids: Tensor) -> None:
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


def _check_positions(positions: Any, input_ids: Tensor) -> Tensor | list[list[int]]:
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


def _to_host(
    input_ids: Tensor, mask: Tensor | None, positions: Tensor | list[list[int]]
) -> tuple[list[list[int]], list[list[int]] | list[None], list[list[int]]]:
    """Copy everything that is on the device in one transfer; a copy for each tensor would wait three times."""
    on_device = [input_ids] + ([mask] if mask is not None else [])
    if isinstance(positions, Tensor) and positions.device == input_ids.device:
        on_device.append(positions)
    widths = [tensor.shape[1] for tensor in on_device]
    joined = torch.cat([tensor.detach().to(torch.int64) for tensor in on_device], dim=1).cpu()
    parts = [part.tolist() for part in torch.split(joined, widths, dim=1)]
    rows = parts.pop(0)
    masks: list[list[int]] | list[None] = parts.pop(0) if mask is not None else [None] * len(rows)
    if isinstance(positions, Tensor):
        return rows, masks, parts.pop(0) if parts else positions.tolist()
    return rows, masks, positions


def _read_row(index: int, ids: list[int], mask: list[int] | None, wanted: list[int], marker_id: int | None) -> Prompt:
    token_ids, marked = _strip(index, ids, mask, marker_id)
    if not token_ids:
        raise CheckpointValueError(f"input_ids row {index} holds no token but pads and markers; a prompt needs one")
    if min(token_ids) < 0:
        raise CheckpointValueError(f"input_ids row {index} holds the negative id {min(token_ids)}; ids are >= 0")
    length = len(token_ids)
    for position in wanted:
        if position < _NO_POSITION or position > length:
            raise CheckpointValueError(
                f"checkpoint_positions row {index} holds {position}, but the prompt has {length} tokens (pads and "
                f"markers not counted); 1 to {length} are allowed, and -1 as filling"
            )
    marked += [position for position in wanted if position != _NO_POSITION]
    boundaries = tuple(sorted({position for position in marked if position > 0}))
    return Prompt(tuple(token_ids), boundaries, _notes(marked, length))


def _strip(index: int, ids: list[int], mask: list[int] | None, marker_id: int | None) -> tuple[list[int], list[int]]:
    """Return a row's real tokens, and for each marker the number of real tokens before it."""
    if mask is not None:
        if not set(mask) <= {0, 1}:
            raise CheckpointValueError(f"attention_mask row {index} holds values other than 0 and 1")
        if 1 not in mask:
            return [], []
        first, stop = mask.index(1), len(mask) - mask[::-1].index(1)
        ids, mask = ids[first:stop], mask[first:stop]
        if 0 in mask and any(not shown and token != marker_id for token, shown in zip(ids, mask, strict=True)):
            raise InteriorPaddingError(
                f"attention_mask row {index} is 0 between real tokens; pads are allowed at the two ends only"
            )
    if marker_id is None:
        return ids, []
    kept: list[int] = []
    marked, start = [], 0
    for _ in range(ids.count(marker_id)):
        place = ids.index(marker_id, start)
        kept += ids[start:place]
        marked.append(len(kept))
        start = place + 1
    return kept + ids[start:], marked


def _notes(marked: list[int], length: int) -> tuple[str, ...]:
    notes = []
    if 0 in marked:
        notes.append("a checkpoint before the first token was ignored: there is nothing to save")
    kept = [position for position in marked if position > 0]
    for position in sorted({position for position in kept if kept.count(position) > 1}):
        notes.append(f"a checkpoint after token {position} was asked for more than once and counts once")
    if length in kept:
        notes.append("a checkpoint at the end of the prompt is saved, and generation starts from it")
    return tuple(notes)

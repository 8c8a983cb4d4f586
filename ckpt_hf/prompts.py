"""From a batch as the caller made it to what the model may see: token ids without pads and markers, and boundaries.

A boundary is a number of tokens, counted over real tokens only: neither pads nor markers count. The caller's tensors
are never written to.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import CheckpointValueError
from .prompt_checks import check_ids, check_mask, check_positions

_NO_POSITION = -1


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

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of ``notes`` that the caller should hear of: a marker at the very end does what it says."""
        return tuple(note for note in self.notes if "end of the prompt" not in note)


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
    check_ids(input_ids)
    check_mask(attention_mask, input_ids)
    if attention_mask is None and marker_id is not None and marker_id == pad_token_id:
        raise CheckpointValueError(
            f"pad_token_id {pad_token_id} is the marker's id, so pads cannot be told from markers; "
            "give an attention_mask or use another pad token"
        )
    positions = check_positions(checkpoint_positions, input_ids)
    rows, masks, position_rows = _to_host(input_ids, attention_mask, positions)
    return [
        _read_row(index, ids, mask, wanted, marker_id)
        for index, (ids, mask, wanted) in enumerate(zip(rows, masks, position_rows, strict=True))
    ]


def read_prompt(token_ids: np.ndarray, marker_id: int | None, checkpoint_positions: Any = None) -> Prompt:
    """As :func:`read_prompts` for one unpadded row of ids ``[L]`` on the host, without making tensors."""
    positions = check_positions(checkpoint_positions, torch.empty((1, 0)))
    wanted = positions.tolist() if isinstance(positions, Tensor) else positions
    return _read_row(0, token_ids, None, wanted[0], marker_id)


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
    ids = np.full((len(prompts), width), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, (size, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        ids[row, width - size :] = array("q", prompt.token_ids)
        mask[row, width - size :] = 1
    both = torch.from_numpy(np.stack([ids, mask])).to(device)
    return both[0], both[1]


def _to_host(
    input_ids: Tensor, mask: Tensor | None, positions: Tensor | list[list[int]]
) -> tuple[np.ndarray, Sequence[np.ndarray | None], list[list[int]]]:
    """Copy everything that is on the device in one transfer; a copy for each tensor would wait three times."""
    on_device = [input_ids] + ([mask] if mask is not None else [])
    if isinstance(positions, Tensor) and positions.device == input_ids.device:
        on_device.append(positions)
    widths = [tensor.shape[1] for tensor in on_device]
    joined = torch.cat([tensor.detach().to(torch.int64) for tensor in on_device], dim=1).cpu()
    parts = [part.numpy() for part in torch.split(joined, widths, dim=1)]
    rows = parts.pop(0)
    masks: Sequence[np.ndarray | None] = list(parts.pop(0)) if mask is not None else [None] * len(rows)
    if isinstance(positions, Tensor):
        return rows, masks, (parts.pop(0) if parts else positions).tolist()
    return rows, masks, positions


def _read_row(index: int, ids: np.ndarray, mask: np.ndarray | None, wanted: list[int], marker_id: int | None) -> Prompt:
    tokens, marked = _strip(index, ids, mask, marker_id)
    if not tokens.size:
        raise CheckpointValueError(f"input_ids row {index} holds no token but pads and markers; a prompt needs one")
    if tokens.min() < 0:
        raise CheckpointValueError(f"input_ids row {index} holds the negative id {tokens.min()}; ids are >= 0")
    length = tokens.size
    for position in wanted:
        if position < _NO_POSITION or position > length:
            raise CheckpointValueError(
                f"checkpoint_positions row {index} holds {position}, but the prompt has {length} tokens (pads and "
                f"markers not counted); 1 to {length} are allowed, and -1 as filling"
            )
    marked += [position for position in wanted if position != _NO_POSITION]
    boundaries = tuple(sorted({position for position in marked if position > 0}))
    return Prompt(tuple(tokens.tolist()), boundaries, _notes(marked, length))


def _strip(index: int, ids: np.ndarray, mask: np.ndarray | None, marker_id: int | None) -> tuple[np.ndarray, list[int]]:
    """Return a row's real tokens, and for each marker the number of real tokens before it."""
    if mask is not None:
        if ((mask != 0) & (mask != 1)).any():
            raise CheckpointValueError(f"attention_mask row {index} holds values other than 0 and 1")
        shown = np.flatnonzero(mask)
        if not shown.size:
            return ids[:0], []
        ids, mask = ids[shown[0] : shown[-1] + 1], mask[shown[0] : shown[-1] + 1]
        if ((mask == 0) & (ids != marker_id)).any():
            raise InteriorPaddingError(
                f"attention_mask row {index} is 0 between real tokens; pads are allowed at the two ends only"
            )
    at = np.flatnonzero(ids == marker_id) if marker_id is not None else ids[:0]
    if not at.size:
        return ids, []
    return np.delete(ids, at), (at - np.arange(at.size)).tolist()


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

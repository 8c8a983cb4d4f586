"""A step plan as tensors: token ids, positions, segments of the recurrence, key/value rows, attention calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckpt_ops import Segment, SegmentTable

from .attention import AttentionPlan, MaskedGroup, Rows, VarlenPass
from .kv import KVSegment
from .plan import Piece, StepPlan


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward of the whole model.

    Attributes:
        token_ids, positions: int64 ``[1, T]``.
        logits_columns: int64 ``[L]``, columns whose logits are wanted, in the order of the plan's ``logits_pieces``.
        table: the sequences of the recurrence; None in a pure decode step.
        slots: int32 ``[T]``, slot of each token in a pure decode step, else None.
        attention: how the row attends.
    """

    token_ids: Tensor
    positions: Tensor
    logits_columns: Tensor
    table: SegmentTable | None
    slots: Tensor | None
    attention: AttentionPlan


class BatchBuilder:
    """Turns plans into tensors on one device."""

    def __init__(self, device: torch.device, varlen: bool) -> None:
        self.device = device
        self.varlen = varlen
        self._prefix_rows: dict[tuple[KVSegment, ...], Rows] = {}

    def forget(self) -> None:
        """Drop the row numbers of the last step; needed when segments grow or move."""
        self._prefix_rows.clear()

    def build(self, plan: StepPlan, num_slots: int) -> PackedBatch:
        """The tensors of ``plan``, which must compute at least one token."""
        pieces = plan.pieces
        stops = np.cumsum([p.length for p in pieces])
        token_ids = array("q")
        for piece in pieces:
            token_ids.extend(piece.request.token_ids[piece.start : piece.stop])
        positions = np.concatenate([np.arange(p.start, p.stop) for p in pieces])
        write_rows = np.concatenate([row_numbers(p.kv)[p.kv_before : p.kv_before + p.length] for p in pieces])
        columns = stops[list(plan.logits_pieces)] - 1
        ids, pos, rows, cols = self._upload(np.asarray(token_ids), positions, write_rows, columns)
        table = slots = None
        if plan.decode:
            slots = torch.tensor([p.destination for p in pieces], dtype=torch.int32, device=self.device)
        else:
            segments = [Segment(p.length, p.parent, p.source, p.destination) for p in pieces]
            table = SegmentTable.build(segments, num_slots, self.device)
        make = self._varlen_plan if self.varlen else self._masked_plan
        if not plan.decode:
            self.forget()
        attention = make([p for p in pieces if p.length], rows)
        return PackedBatch(ids[None], pos[None], cols, table, slots, attention)

    def _upload(self, *arrays: np.ndarray) -> list[Tensor]:
        """All index arrays in one transfer."""
        packed = torch.from_numpy(np.concatenate([np.asarray(a, dtype=np.int64) for a in arrays]))
        if self.device.type == "cuda":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return list(torch.split(packed, [len(a) for a in arrays]))

    def _masked_plan(self, pieces: Sequence[Piece], write_rows: Tensor) -> AttentionPlan:
        groups = []
        column = 0
        for members in _by_prefix(pieces):
            stop = column + sum(p.length for p in members)
            prefix = members[0].kv.parent
            prefix_rows = path_rows(prefix)
            own_rows = [row_numbers(p.kv)[: p.kv_before + p.length] for p in members]
            rows = self._rows(np.concatenate([prefix_rows, *own_rows]))
            groups.append(MaskedGroup(slice(column, stop), rows, self._mask(members, len(prefix_rows))))
            column = stop
        return AttentionPlan(write_rows, groups=tuple(groups))

    def _mask(self, members: Sequence[Piece], prefix_tokens: int) -> Tensor | None:
        if len(members) == 1 and not prefix_tokens and not members[0].kv_before:
            return None
        width = prefix_tokens + sum(p.kv_before + p.length for p in members)
        mask = np.zeros((sum(p.length for p in members), width), dtype=bool)
        mask[:, :prefix_tokens] = True
        row, column = 0, prefix_tokens
        for piece in members:
            seen = piece.kv_before + piece.length
            mask[row : row + piece.length, column : column + seen] = np.tri(piece.length, seen, piece.kv_before, bool)
            row, column = row + piece.length, column + seen
        return torch.from_numpy(mask).to(self.device)

    def _varlen_plan(self, pieces: Sequence[Piece], write_rows: Tensor) -> AttentionPlan:
        lengths = [p.length for p in pieces]
        fresh = all(p.kv_before == 0 for p in pieces)
        own_rows = None if fresh else np.concatenate([row_numbers(p.kv)[: p.kv_before + p.length] for p in pieces])
        seen = [p.kv_before + p.length for p in pieces]
        own = self._varlen_pass(slice(0, sum(lengths)), lengths, None if fresh else self._rows(own_rows), seen, True)
        groups = [members for members in _by_prefix(pieces) if members[0].kv.parent is not None]
        if not groups:
            return AttentionPlan(write_rows, own=own)
        queries = [sum(p.length for p in members) for members in groups]
        prefixes = [members[0].kv.parent for members in groups]
        shared_rows = self._shared_rows([p for p in prefixes if p is not None])
        prefix_tokens = [sum(map(len, p.path())) for p in prefixes if p is not None]
        total = sum(lengths)
        # Pieces without a prefix come first in the row, so that the others are one range of columns.
        prefix = self._varlen_pass(slice(total - sum(queries), total), queries, shared_rows, prefix_tokens, False)
        return AttentionPlan(write_rows, own=own, prefix=prefix)

    def _varlen_pass(
        self, queries: slice, query_lengths: list[int], rows: Rows | None, row_lengths: list[int], causal: bool
    ) -> VarlenPass:
        bounds = np.zeros((2, len(query_lengths) + 1), dtype=np.int32)
        np.cumsum(query_lengths, out=bounds[0, 1:])
        np.cumsum(row_lengths, out=bounds[1, 1:])
        cu = torch.from_numpy(bounds).to(self.device, non_blocking=True)
        return VarlenPass(queries, rows, cu[0], cu[1], max(query_lengths), max(row_lengths), causal)

    def _shared_rows(self, prefixes: Sequence[KVSegment]) -> Rows:
        """Rows of the prefixes one after another. A decode step finds those of the step before."""
        key = tuple(prefixes)
        if key not in self._prefix_rows:
            self._prefix_rows.clear()
            self._prefix_rows[key] = self._rows(np.concatenate([path_rows(p) for p in prefixes]))
        return self._prefix_rows[key]

    def _rows(self, numbers: np.ndarray | None) -> Rows:
        assert numbers is not None
        if len(numbers) and numbers[-1] - numbers[0] + 1 == len(numbers) and np.all(np.diff(numbers) == 1):
            return slice(int(numbers[0]), int(numbers[-1]) + 1)
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)


def _by_prefix(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Neighbours that continue the same segment; a piece without a prefix is a group of its own."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        parent = piece.kv.parent
        if groups and parent is not None and groups[-1][0].kv.parent is parent:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def row_numbers(segment: KVSegment) -> np.ndarray:
    """Key/value rows of one segment's tokens, int64."""
    return np.array(segment.rows, dtype=np.int64)


def path_rows(segment: KVSegment | None) -> np.ndarray:
    """Key/value rows of every token from the start of the sequence to the end of ``segment``, int64."""
    if segment is None:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([row_numbers(s) for s in segment.path()])

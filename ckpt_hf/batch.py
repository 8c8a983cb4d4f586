"""A step plan as tensors: token ids, positions, segments of the recurrence, key/value rows, attention calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckpt_ops import Segment, SegmentTable

from .attention import AttentionPart, AttentionPlan, DecodeRows, MaskedGroup, Rows, VarlenPass
from .kv import KVSegment
from .plan import Piece, StepPlan
from .row_table import RowTable, append_rows, path_rows, row_numbers


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward of the whole model: columns of prefill pieces, then one column for each decoding request.

    Attributes:
        token_ids, positions: int64 ``[1, T]``.
        logits_columns: int64 ``[L]``, columns whose logits are wanted: the plan's ``logits_pieces``, then each decode
            token.
        prefill_tokens: columns before the first decode token.
        table: the sequences of the recurrence in the prefill columns; None without any.
        slots: int32 ``[B]``, slot of each decode token; None without any.
        attention: how the row attends.
    """

    token_ids: Tensor
    positions: Tensor
    logits_columns: Tensor
    prefill_tokens: int
    table: SegmentTable | None
    slots: Tensor | None
    attention: AttentionPlan


class BatchBuilder:
    """Turns plans into tensors on one device.

    Args:
        device: the model's.
        varlen: whether variable-length attention serves the prefill pieces, else masked calls do.
        row_table: whether decode tokens attend through a table of rows; the default is on a GPU only.
    """

    def __init__(self, device: torch.device, varlen: bool, row_table: bool | None = None) -> None:
        self.device = device
        self.varlen = varlen
        use_table = device.type == "cuda" if row_table is None else row_table
        self.row_table = RowTable(device) if use_table else None

    def forget(self) -> None:
        """Drop the row numbers of earlier steps; needed when rows move."""
        if self.row_table is not None:
            self.row_table.forget()

    def build(self, plan: StepPlan, num_slots: int) -> PackedBatch:
        """The tensors of ``plan``, which must compute at least one token."""
        prompts, decodes = plan.pieces, decode_pieces(plan)
        pieces = (*prompts, *decodes)
        stops = np.cumsum([p.length for p in pieces])
        token_ids = array("q")
        for piece in pieces:
            token_ids.extend(piece.request.token_ids[piece.start : piece.stop])
        positions = np.concatenate([np.arange(p.start, p.stop) for p in pieces])
        write_rows = np.concatenate([row_numbers(p.kv)[p.kv_before : p.kv_before + p.length] for p in pieces])
        columns = stops[[*plan.logits_pieces, *range(len(prompts), len(pieces))]] - 1
        lines = self.row_table.lines([p.request for p in decodes]) if self.row_table and decodes else []
        decode_slots = [p.destination for p in decodes]
        ids, pos, rows, cols, line_numbers, slots = self._upload(
            np.asarray(token_ids), positions, write_rows, columns, lines, decode_slots
        )
        table = None
        if prompts:
            segments = [Segment(p.length, p.parent, p.source, p.destination) for p in prompts]
            table = SegmentTable.build(segments, num_slots, self.device)
        prefill = len(ids) - len(decodes)
        parts = []
        if prefill:
            make = self._varlen_part if self.varlen else self._masked_part
            parts.append(make([p for p in prompts if p.length], slice(0, prefill), rows[:prefill]))
        if decodes:
            rest = slice(prefill, len(ids))
            parts.append(self._decode_part(decodes, rest, rows[rest], pos[rest], line_numbers))
        state_slots = slots.to(torch.int32) if decodes else None
        return PackedBatch(ids[None], pos[None], cols, prefill, table, state_slots, AttentionPlan(rows, tuple(parts)))

    def _decode_part(
        self, pieces: Sequence[Piece], columns: slice, write_rows: Tensor, positions: Tensor, lines: Tensor
    ) -> AttentionPart:
        if self.row_table is None:
            return self._masked_part(pieces, columns, write_rows)
        append_rows(self.row_table.table, lines, positions, write_rows)
        rows = DecodeRows(self.row_table.table, lines, positions)
        return AttentionPart(columns, write_rows, decode=rows)

    def _upload(self, *arrays: np.ndarray | list[int]) -> list[Tensor]:
        """All index arrays in one transfer."""
        packed = torch.from_numpy(np.concatenate([np.asarray(a, dtype=np.int64) for a in arrays]))
        if self.device.type == "cuda":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        return list(torch.split(packed, [len(a) for a in arrays]))

    def _masked_part(self, pieces: Sequence[Piece], columns: slice, write_rows: Tensor) -> AttentionPart:
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
        return AttentionPart(columns, write_rows, groups=tuple(groups))

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

    def _varlen_part(self, pieces: Sequence[Piece], columns: slice, write_rows: Tensor) -> AttentionPart:
        lengths = [p.length for p in pieces]
        fresh = all(p.kv_before == 0 for p in pieces)
        own_rows = None if fresh else np.concatenate([row_numbers(p.kv)[: p.kv_before + p.length] for p in pieces])
        seen = [p.kv_before + p.length for p in pieces]
        own = self._varlen_pass(slice(0, sum(lengths)), lengths, None if fresh else self._rows(own_rows), seen, True)
        groups = [members for members in _by_prefix(pieces) if members[0].kv.parent is not None]
        if not groups:
            return AttentionPart(columns, write_rows, own=own)
        queries = [sum(p.length for p in members) for members in groups]
        prefixes = [members[0].kv.parent for members in groups]
        shared_rows = self._rows(np.concatenate([path_rows(p) for p in prefixes]))
        prefix_tokens = [sum(map(len, p.path())) for p in prefixes if p is not None]
        total = sum(lengths)
        # Pieces without a prefix come first in the row, so that the others are one range of columns.
        prefix = self._varlen_pass(slice(total - sum(queries), total), queries, shared_rows, prefix_tokens, False)
        return AttentionPart(columns, write_rows, own=own, prefix=prefix)

    def _varlen_pass(
        self, queries: slice, query_lengths: list[int], rows: Rows | None, row_lengths: list[int], causal: bool
    ) -> VarlenPass:
        bounds = np.zeros((2, len(query_lengths) + 1), dtype=np.int32)
        np.cumsum(query_lengths, out=bounds[0, 1:])
        np.cumsum(row_lengths, out=bounds[1, 1:])
        cu = torch.from_numpy(bounds).to(self.device, non_blocking=True)
        return VarlenPass(queries, rows, cu[0], cu[1], max(query_lengths), max(row_lengths), causal)

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


def decode_pieces(plan: StepPlan) -> tuple[Piece, ...]:
    """The newest token of each decoding request as a piece, requests behind one prefix side by side.

    Requests that have ended since the step was planned are left out.
    """
    rank: dict[KVSegment | None, int] = {}
    pieces = []
    for request in plan.decodes:
        if request.in_step != plan.step:
            continue
        assert request.kv is not None and request.slot is not None
        rank.setdefault(request.kv.parent, len(rank))
        start, before = request.position, len(request.kv) - 1
        piece = Piece(request, start, start + 1, -1, request.slot, request.slot, request.kv, before, 0, None)
        pieces.append(piece)
    return tuple(sorted(pieces, key=lambda p: rank[p.kv.parent]))

"""The table of key/value rows of the requests that decode, kept on the device from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .kv import KVSegment
from .requests import Request, RequestStatus

SCRATCH_LINE = 0
"""Line of the rows that only fill a batch up; no request ever owns it."""
_SMALLEST_CAPACITY = 256


@dataclass(slots=True)
class _Line:
    number: int
    kv: KVSegment | None
    filled: int


class RowTable:
    """Key/value row by request and position.

    The rows of a prompt are uploaded when its request decodes for the first time; after that each step writes the one
    row that is new, on the device (:meth:`append`).
    """

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros((1, _SMALLEST_CAPACITY), dtype=torch.int32, device=device)
        self._lines: dict[Request, _Line] = {}
        self._free: list[int] = []

    def lines(self, requests: Sequence[Request]) -> list[int]:
        """The line of each request, filled up to but not including its newest token."""
        self._grow(max(r.position for r in requests) + 1, self.table.shape[0])
        return [self._line(request) for request in requests]

    def forget(self) -> None:
        """Drop all lines; needed when rows move."""
        self._free.extend(line.number for line in self._lines.values())
        self._lines.clear()

    def _line(self, request: Request) -> int:
        line = self._lines.get(request)
        if line is None:
            line = self._lines[request] = _Line(self._take(), None, 0)
        if line.kv is not request.kv or line.filled < request.position:
            rows = torch.from_numpy(path_rows(request.kv)[: request.position].astype(np.int32))
            self.table[line.number, : len(rows)] = rows.to(self.table.device, non_blocking=True)
            line.kv = request.kv
        line.filled = request.position + 1
        return line.number

    def _take(self) -> int:
        if not self._free:
            for request in [r for r in self._lines if r.status is not RequestStatus.DECODE]:
                self._free.append(self._lines.pop(request).number)
        if not self._free:
            first = self.table.shape[0]
            self._grow(self.table.shape[1], 2 * first)
            self._free.extend(range(2 * first - 1, max(first, SCRATCH_LINE + 1) - 1, -1))
        return self._free.pop()

    def _grow(self, capacity: int, lines: int) -> None:
        old = self.table
        width = old.shape[1]
        while width < capacity:
            width *= 2
        if (lines, width) != tuple(old.shape):
            self.table = torch.zeros((lines, width), dtype=torch.int32, device=old.device)
            self.table[: old.shape[0], : old.shape[1]] = old


def append_rows(table: Tensor, lines: Tensor, positions: Tensor, rows: Tensor) -> None:
    """Write each token's own row ``[B]`` at its place in ``table``, on the device."""
    table[lines, positions] = rows.to(torch.int32)


def row_numbers(segment: KVSegment) -> np.ndarray:
    """Key/value rows of one segment's tokens, int64."""
    return np.array(segment.rows, dtype=np.int64)


def path_rows(segment: KVSegment | None) -> np.ndarray:
    """Key/value rows of every token from the start of the sequence to the end of ``segment``, int64."""
    if segment is None:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([row_numbers(s) for s in segment.path()])

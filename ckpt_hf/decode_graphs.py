"""Steps that only decode, with batches filled up to one of a few sizes, so that on a GPU each is one CUDA graph.

A row that only fills up has slot -1, writes its key and value to a row that nobody owns, and is dropped in the end.
Everything that changes from step to step lies in one buffer, which is all that a step uploads.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import AttentionPart, AttentionPlan, DecodeRows
from .batch import PackedBatch
from .errors import CheckpointWarning
from .layers import PackedCache
from .plan import Piece
from .pools import KVPools, StatePools
from .row_table import SCRATCH_LINE, RowTable, append_rows

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes; a batch in between is filled up by at most half, from 16 on by a third or less."""
_PADDING = -1


def bucket_for(rows: int) -> int | None:
    """The smallest of ``BUCKETS`` that holds ``rows``; None when there is none."""
    at = bisect_left(BUCKETS, rows)
    return BUCKETS[at] if rows and at < len(BUCKETS) else None


def padded_inputs(
    pieces: Sequence[Piece], write_rows: Sequence[int], lines: Sequence[int], bucket: int, scratch_row: int
) -> Tensor:
    """What one step uploads: int64 ``[5, bucket]``.

    Args:
        pieces: one token each.
        write_rows: key/value row of each token.
        lines: line of each request in the table of rows.
        bucket: rows of the batch.
        scratch_row: key/value row that nobody owns.

    Returns:
        Token ids, positions, key/value rows, lines and slots; a row that fills up has slot -1.
    """
    columns = [
        (piece.request.token_ids[piece.start], piece.start, row, line, piece.destination)
        for piece, row, line in zip(pieces, write_rows, lines, strict=True)
    ]
    columns += [(0, 0, scratch_row, SCRATCH_LINE, _PADDING)] * (bucket - len(columns))
    return torch.tensor(columns, dtype=torch.int64).t().contiguous()


@dataclass(slots=True)
class _Bucket:
    buffer: Tensor
    graph: Any = None
    logits: Tensor | None = None


class DecodeGraphs:
    """Runs decode steps of one model in batches of fixed sizes.

    Args:
        model: whose forward it is.
        states, kv: the pools that the graphs read and write.
        rows: the table of key/value rows.
        capture: replay CUDA graphs; without, the padded batches run as they are.
    """

    def __init__(self, model: Any, states: StatePools, kv: KVPools, rows: RowTable, capture: bool) -> None:
        self._model = model
        self._states = states
        self._kv = kv
        self._rows = rows
        self._capture = capture
        self._buckets: dict[int, _Bucket] = {}
        self._made_for: tuple[Any, ...] = ()
        self._pool: Any = None
        self.identity = b""
        self.replays = 0

    def run(self, pieces: Sequence[Piece]) -> Tensor | None:
        """Compute one token for each of ``pieces``.

        Returns:
            Logits ``[len(pieces), V]``, which may be kept; None when the batch is too large for any size.
        """
        bucket = bucket_for(len(pieces))
        if bucket is None:
            return None
        lines = self._rows.lines([piece.request for piece in pieces])
        self._drop_stale()
        entry = self._buckets.get(bucket) or self._prepare(bucket)
        write_rows = [piece.kv.rows[piece.kv_before] for piece in pieces]
        inputs = padded_inputs(pieces, write_rows, lines, bucket, self._kv.num_rows)
        if entry.buffer.is_cuda:
            inputs = inputs.pin_memory()
        entry.buffer.copy_(inputs, non_blocking=True)
        if entry.graph is None:
            return self._forward(entry.buffer)[: len(pieces)]
        entry.graph.replay()
        self.replays += 1
        assert entry.logits is not None
        return entry.logits[: len(pieces)].clone()

    def _drop_stale(self) -> None:
        """Graphs hold the addresses of pools, table and weights; all are dropped when one of these has changed."""
        current = (self._states.resizes, self._kv.resizes, self._rows.table.data_ptr(), self.identity)
        if current != self._made_for:
            self._buckets.clear()
            self._made_for = current

    def _prepare(self, bucket: int) -> _Bucket:
        filling = padded_inputs((), (), (), bucket, self._kv.num_rows)
        entry = self._buckets[bucket] = _Bucket(filling.to(self._rows.table.device))
        if self._capture:
            try:
                self._record(entry)
            except torch.OutOfMemoryError:
                entry.graph = None  # this size runs as it is until there is reason to try again
            except RuntimeError as error:
                entry.graph, self._capture = None, False
                warnings.warn(
                    f"decode steps run without CUDA graphs, because recording one failed: {error!r}",
                    CheckpointWarning,
                    stacklevel=2,
                )
        return entry

    def _record(self, entry: _Bucket) -> None:
        """Record the step on rows that only fill up, so that nothing which anybody owns is touched."""
        with torch.cuda.device(entry.buffer.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(entry.buffer)  # compiles kernels and makes workspaces, which a recording must not
            torch.cuda.current_stream().wait_stream(stream)
            if not any(other.graph for other in self._buckets.values()):
                # The allocator has let go of a pool that no graph holds any more, and refuses to take it up again.
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads go on allocating memory while this one records.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                entry.logits = self._forward(entry.buffer)
        entry.graph = graph

    def _forward(self, buffer: Tensor) -> Tensor:
        """Logits ``[bucket, V]`` of the step whose inputs lie in ``buffer``."""
        token_ids, positions, write_rows, lines, slots = buffer.unbind()
        append_rows(self._rows.table, lines, positions, write_rows)
        rows = DecodeRows(self._rows.table, lines, positions)
        part = AttentionPart(slice(0, buffer.shape[1]), write_rows, decode=rows)
        plan = AttentionPlan(write_rows, (part,))
        columns = torch.arange(buffer.shape[1], device=buffer.device)
        batch = PackedBatch(token_ids[None], positions[None], columns, 0, None, slots.to(torch.int32), plan)
        return forward(self._model, batch, self._states, self._kv)


def forward(model: Any, batch: PackedBatch, states: StatePools, kv: KVPools) -> Tensor:
    """The model's logits ``[L, V]`` at the batch's ``logits_columns``."""
    output = model(
        input_ids=batch.token_ids,
        position_ids=batch.positions,
        attention_mask={"full_attention": None, "linear_attention": None},
        cache=PackedCache(batch, states, kv),
        use_cache=True,
        logits_to_keep=batch.logits_columns,
        return_dict=True,
    )
    return output.logits[0]

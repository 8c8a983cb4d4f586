"""Device memory behind slots and key/value rows: one recurrent and one convolution pool a GDN layer, one key and one
value pool an attention layer. Pools grow with what is used and keep their rows when they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """Row shapes of one model's pools.

    Attributes:
        recurrent: ``[H_v, D_k, D_v]`` by the index of each GDN layer.
        conv: ``[C, W - 1]`` by the index of each GDN layer.
        kv: ``[H_kv, D]`` by the index of each attention layer.
    """

    recurrent: dict[int, tuple[int, ...]]
    conv: dict[int, tuple[int, ...]]
    kv: dict[int, tuple[int, ...]]


_GPU_STEP_SLOTS, _GPU_STEP_ROWS = 8, 2048


def _grown(rows: int, needed: int, step: int) -> int:
    """Rows to have when ``needed`` are: half as many again, on a GPU a multiple of ``step``.

    CUDA graphs hold the pools' addresses and are recorded anew whenever a pool has grown.
    """
    wanted = needed if rows == 0 else max(needed, rows + rows // 2)
    return -(-wanted // step) * step


class StatePools:
    """Recurrent states ``[slots, H_v, D_k, D_v]`` and convolution states ``[slots, C, W - 1]`` of every GDN layer."""

    def __init__(self, shapes: LayerShapes, dtype: torch.dtype, conv_dtype: torch.dtype, device: torch.device) -> None:
        self.recurrent = {
            layer: torch.empty((0, *shape), dtype=dtype, device=device) for layer, shape in shapes.recurrent.items()
        }
        self.conv = {
            layer: torch.empty((0, *shape), dtype=conv_dtype, device=device) for layer, shape in shapes.conv.items()
        }
        self.num_slots = 0
        self.resizes = 0
        self._step = _GPU_STEP_SLOTS if device.type == "cuda" else 1

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(
            pool[0:0].new_empty((1, *pool.shape[1:]), device="meta").nbytes
            for pools in (self.recurrent, self.conv)
            for pool in pools.values()
        )

    def reserve(self, num_slots: int) -> None:
        """Make room for ``num_slots`` slots."""
        if num_slots > self.num_slots:
            try:
                self._resize(_grown(self.num_slots, num_slots, self._step), None)
            except torch.OutOfMemoryError:
                self._resize(num_slots, None)

    def compact(self, old_slots: Sequence[int]) -> None:
        """Keep only ``old_slots``, as slots 0, 1, 2, ..."""
        self._resize(len(old_slots), old_slots)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole slots; a source of -1 stands for the zero state."""
        for source, destination in zip(sources, destinations, strict=True):
            for pools in (self.recurrent, self.conv):
                for pool in pools.values():
                    if source < 0:
                        pool[destination].zero_()
                    else:
                        pool[destination].copy_(pool[source])

    @torch.inference_mode(False)  # a pool made in inference mode could not be written to outside of it
    def _resize(self, num_slots: int, kept: Sequence[int] | None) -> None:
        for pools in (self.recurrent, self.conv):
            for layer, pool in pools.items():
                resized = pool.new_empty((num_slots, *pool.shape[1:]))
                if kept is None:
                    resized[: self.num_slots].copy_(pool[: self.num_slots])
                elif num_slots:
                    torch.index_select(pool, 0, torch.tensor(kept, device=pool.device), out=resized)
                pools[layer] = resized
        self.num_slots = num_slots
        self.resizes += 1


class KVPools:
    """Keys and values ``[rows + 1, H_kv, D]`` of every attention layer; graphs write to the last row, nobody's."""

    def __init__(self, shapes: LayerShapes, dtype: torch.dtype, device: torch.device) -> None:
        self.keys = {layer: torch.empty((0, *shape), dtype=dtype, device=device) for layer, shape in shapes.kv.items()}
        self.values = {layer: torch.empty_like(pool) for layer, pool in self.keys.items()}
        self.num_rows = 0
        self.resizes = 0
        self._step = _GPU_STEP_ROWS if device.type == "cuda" else 1

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token over all layers."""
        return sum(
            pool.new_empty((1, *pool.shape[1:]), device="meta").nbytes
            for pools in (self.keys, self.values)
            for pool in pools.values()
        )

    def reserve(self, num_rows: int) -> None:
        """Make room for ``num_rows`` tokens."""
        if num_rows > self.num_rows:
            try:
                self._resize(_grown(self.num_rows, num_rows, self._step), None)
            except torch.OutOfMemoryError:
                self._resize(num_rows, None)

    def compact(self, old_rows: Sequence[int]) -> None:
        """Keep only ``old_rows``, as rows 0, 1, 2, ..."""
        self._resize(len(old_rows), old_rows)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values ``[T, H_kv, D]`` at ``rows`` ``[T]``."""
        self.keys[layer].index_copy_(0, rows, keys)
        self.values[layer].index_copy_(0, rows, values)

    @torch.inference_mode(False)
    def _resize(self, num_rows: int, kept: Sequence[int] | None) -> None:
        for pools in (self.keys, self.values):
            for layer, pool in pools.items():
                resized = pool.new_empty((num_rows + 1, *pool.shape[1:]))
                resized[num_rows:].zero_()
                if kept is None:
                    resized[: self.num_rows].copy_(pool[: self.num_rows])
                elif num_rows:
                    torch.index_select(pool, 0, torch.tensor(kept, device=pool.device), out=resized[:num_rows])
                pools[layer] = resized
        self.num_rows = num_rows
        self.resizes += 1

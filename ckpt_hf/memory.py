"""Everything that a model's steps read and write: pools on the device, their owners on the host, the scheduler."""

from __future__ import annotations

from typing import Any

import torch

from .attention import varlen_supported
from .batch import BatchBuilder
from .config import CheckpointConfig
from .decode_graphs import DecodeGraphs
from .events import Emit
from .families import find_layers
from .index import CheckpointIndex, CheckpointLimits
from .kv import KVRows
from .pools import KVPools, StatePools
from .running_limit import RunningLimit
from .scheduler import Scheduler
from .slots import SlotAllocator

_DEFAULT_MEMORY_SHARE = 10
_CPU_DEFAULT_BYTES = 1 << 30


class StepMemory:
    """Pools and bookkeeping of one model on one device.

    Args:
        model: a patched model, on its device.
        config: the caller's settings.
        emit: hears of everything that the scheduler decides.
    """

    def __init__(self, model: Any, config: CheckpointConfig, emit: Emit | None = None) -> None:
        device, dtype = model.device, model.dtype
        shapes = find_layers(model).shapes()
        self.states = StatePools(shapes, getattr(torch, config.state_dtype), dtype, device)
        self.kv = KVPools(shapes, dtype, device)
        self.slots, self.kv_rows = SlotAllocator(), KVRows()
        limits = CheckpointLimits(
            config.cache_slots,
            _byte_limit(config, device),
            self.states.bytes_per_slot,
            self.kv.bytes_per_row,
            lambda row: row.nbytes,
        )
        self.index = CheckpointIndex(self.slots, self.kv_rows, limits)
        self.scheduler = Scheduler(self.index, self.slots, self.kv_rows, config.max_batch_tokens, emit)
        self.running = RunningLimit(self.scheduler, config.max_running, config.memory_bytes)
        head_dims = {shape[-1] for shape in shapes.kv.values()}
        self.builder = BatchBuilder(device, all(varlen_supported(device, dtype, d) for d in head_dims))
        self.graphs: DecodeGraphs | None = None
        if config.decode_graphs and device.type == "cuda" and self.builder.row_table is not None:
            self.graphs = DecodeGraphs(model, self.states, self.kv, self.builder.row_table, capture=True)

    def reserve(self) -> None:
        """Make the pools as large as their owners' numbers say."""
        self.states.reserve(self.slots.high_water)
        self.kv.reserve(self.kv_rows.high_water)

    def trim(self) -> None:
        """Let the next :meth:`reserve` ask for no more than what is owned now."""
        self.slots.trim()
        self.kv_rows.trim()

    def release_slack(self) -> None:
        """Shrink the pools when they hold more memory for nobody than the checkpoints may use; no request may exist."""
        slack = (self.states.num_slots - self.slots.used) * self.states.bytes_per_slot
        slack += (self.kv.num_rows - self.kv_rows.used) * self.kv.bytes_per_row
        allowed = self.index.limits.bytes
        if allowed is None:
            allowed = (self.index.limits.slots or 1) * self.states.bytes_per_slot
        if slack <= allowed:
            return
        moved = self.slots.compact()
        self.states.compact(list(moved))
        for checkpoint in self.index.checkpoints:
            if checkpoint.slot is not None:
                checkpoint.slot = moved[checkpoint.slot]
        self.kv.compact(self.kv_rows.compact())
        self.builder.forget()


def _byte_limit(config: CheckpointConfig, device: torch.device) -> int | None:
    if config.cache_bytes is not None or config.cache_slots is not None:
        return config.cache_bytes
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // _DEFAULT_MEMORY_SHARE
    return _CPU_DEFAULT_BYTES

"""The least time a load can take: the bytes that must move, at the speed of a copy measured on the same device."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.loads import Load, Shape
from benchmarks.measure import GRAPH_OF_MANY, Run, Timer

_STATE_BYTES = 4  # fp32


def bytes_moved(shape: Shape, load: Load) -> int:
    """Bytes that any way to run ``load`` reads or writes at least once, with every prefix shared.

    Tokens in and out; each Producer's start and checkpoint; each Consumer's final state. That Consumers read the
    checkpoint is not counted: it can stay on the chip. Neither are weights.
    """
    width = shape.dtype.itemsize
    channels = (2 * shape.heads_k + shape.heads_v) * shape.dim
    gates = 2 * shape.heads_v * (width if shape.conv_width else 4)
    token = (channels + shape.heads_v * shape.dim) * width + gates
    slot = shape.heads_v * shape.dim**2 * _STATE_BYTES + channels * max(0, shape.conv_width - 1) * width
    tokens = sum(load.producers) + sum(load.consumers)
    return tokens * token + (2 * len(load.producers) + len(load.consumers)) * slot


def copy_of(num_bytes: int, device: torch.device) -> Run:
    """A copy that reads and writes ``num_bytes`` together."""
    source = torch.ones(max(1, num_bytes // 8), dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    return copy


def copy_bandwidth(timer: Timer) -> float:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    num_bytes = 2**32 if timer.device.type == "cuda" else 2**27
    modes = timer.modes()
    time_it = modes.get(GRAPH_OF_MANY, next(iter(modes.values())))
    return num_bytes / (time_it(copy_of(num_bytes, timer.device)).median * 1e-6)

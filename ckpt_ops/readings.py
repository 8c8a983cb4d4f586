"""Host values that a caller hands over, in the types that this package goes on with; each error names the argument."""

from __future__ import annotations

from math import isfinite
from operator import index as index_of
from typing import Any

import torch

from ckpt_ops.errors import ArgumentError


def read_integer(name: str, value: Any, of: str = "") -> int:
    """``value`` in Python's own integers: sums of narrower ones would wrap. ``of`` comes before the name."""
    try:
        return index_of(value)
    except TypeError as error:
        raise ArgumentError(f"{of}{name} must be an integer, got {value!r}") from error


def read_factor(name: str, value: Any) -> float:
    """A finite number in Python's own floats."""
    if isinstance(value, (bool, str, torch.Tensor)) or not hasattr(value, "__float__") or not isfinite(value):
        raise ArgumentError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def read_items(name: str, values: Any) -> list[Any]:
    """The items of a sequence."""
    try:
        return list(values)
    except TypeError as error:
        raise ArgumentError(f"{name} must be a sequence, got {type(values).__name__}") from error


def read_integers(name: str, values: Any) -> list[int]:
    """A sequence of integers, as :func:`read_integer` reads one."""
    return [read_integer(f"{name}[{index}]", value) for index, value in enumerate(read_items(name, values))]


def read_device(device: Any) -> torch.device:
    """A device of torch, given as such or by its name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device must be a device of torch or its name, got {device!r}: {error}") from error

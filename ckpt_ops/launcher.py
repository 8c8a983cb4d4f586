"""Launching a kernel that has been compiled before without asking Triton again how.

Triton examines every argument of every launch. Here the caller promises what its kernels were specialised for (tensors
aligned to 16 bytes, strides that are multiples of 16, all other integers not specialised), so that a key of dtypes and
constants is enough to find the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16


def is_aligned(x: Tensor) -> bool:
    """Whether a kernel may be specialised for ``x``: its data and its rows begin at multiples of 16 bytes and elements."""
    return x.data_ptr() % ALIGNMENT == 0 and x.stride(0) % ALIGNMENT == 0


class Launcher:
    """One kernel and its compiled forms, by device and key.

    Args:
        kernel: a Triton or Gluon function.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], key: Hashable, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Launch on the current device.

        Args:
            grid: number of programs in each dimension.
            key: all that the compiled form depends on: dtypes and constants. None: ask Triton.
            arguments: all of the kernel's, in order, constants included.
            options: number of warps and the like, determined by ``key``.
        """
        if key is None:
            self.kernel[grid](*arguments, **options)
            return
        key = (torch.cuda.current_device(), key)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self.kernel[grid](*arguments, **options)
        else:
            compiled[grid](*arguments)

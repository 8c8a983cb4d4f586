"""Launching a kernel that has been compiled before without asking Triton again how.

Triton examines every argument of every launch, which takes longer than a short kernel runs. Here the caller promises
what its kernels were specialised for (tensors aligned to 16 bytes, strides that are multiples of 16, all other integers
not specialised), so that dtypes and constants are enough to find the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

ALIGNMENT = 16


def is_aligned(x: Tensor) -> bool:
    """Whether a kernel may be specialised for ``x``: its data begin at a multiple of 16 bytes, and its rows at
    multiples of 16 elements."""
    return x.data_ptr() % ALIGNMENT == 0 and x.stride(0) % ALIGNMENT == 0


class Launcher:
    """One kernel and its compiled forms.

    Args:
        kernel: a Triton or Gluon function.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        key: Hashable,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        pointers: tuple[int, ...] = (),
    ) -> None:
        """Launch on the current device.

        Args:
            grid: number of programs in each dimension.
            key: all that the compiled form depends on beside the device: dtypes and constants. None: ask Triton.
            arguments: all of the kernel's, in order, constants included.
            options: number of warps and the like, determined by ``key``.
            pointers: of all tensors, which are the first arguments; for callers that launch with them more than once.
        """
        if key is None:
            self.kernel[grid](*arguments, **options)
            return
        device = torch.cuda.current_device()
        compiled = self._compiled.get((device, key))
        if compiled is None:
            self._compiled[device, key] = self.kernel[grid](*arguments, **options)
            return
        if pointers:
            values = (*pointers, *arguments[len(pointers) :])
        else:
            values = tuple([x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])
        if _is_watched():
            compiled[grid](*values)
            return
        stream = driver.active.get_current_stream(device)
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def _is_watched() -> bool:
    """Whether a profiler has asked Triton to be told of launches."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return _calls_any(before) or _calls_any(after)


def _calls_any(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))

"""Block sizes of the kernels for each architecture, and what every launch needs of its tensors.

Block sizes depend on the architecture, the head dimensions and the dtype only, never on the batch, so that a sequence's
result is the same, to the bit, whatever runs beside it. There is no autotuning: it would run kernels that write states
many times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ckpt_ops.chunked import CHUNK
from ckpt_ops.launcher import ALIGNMENT, is_aligned

_MAX_STRIDE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Config:
    """Block sizes of the delta rule kernels: chunk length, BK and BV that pad D_k and slice D_v, warps and stages; and
    whether sm_90's own kernels run such heads instead."""

    chunk: int
    block_k: int
    block_v: int
    intra_warps: int
    intra_stages: int
    chain_warps: int
    chain_stages: int
    decode_block_v: int
    decode_warps: int
    hopper: bool


def choose_config(capability: int, dim_k: int, dim_v: int, dtype: torch.dtype) -> Config:
    """Block sizes for ``capability`` (90 for sm_90), chosen so that shared memory fits: 163 KiB a block on sm_80,
    99 KiB on sm_86 and sm_89, 227 KiB on sm_90 and sm_100."""
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (dim_k, dim_v))
    half = dtype != torch.float32
    small = capability in (86, 89, 120, 121)
    # fp32 products run on the FMA units, which hold whole operands in registers: shorter chunks and thinner slices.
    limit_v = (64 if block_k <= 128 else 32) if half else 16
    chunk = CHUNK if half else (32 if block_k <= 64 else 16)
    return Config(
        chunk=chunk,
        block_k=block_k,
        block_v=min(block_v, limit_v),
        intra_warps=4,
        intra_stages=1,
        chain_warps=4,
        chain_stages=2 if half and not small and block_k <= 128 else 1,
        decode_block_v=min(block_v, 64),
        decode_warps=4,
        hopper=capability == 90 and half and dim_k in (64, 128) and dim_v % 64 == 0,
    )


@lru_cache(maxsize=256)
def config_for(device: torch.device, dim_k: int, dim_v: int, dtype: torch.dtype) -> Config:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return choose_config(10 * major + minor, dim_k, dim_v, dtype)
    return replace(choose_config(90, dim_k, dim_v, dtype), hopper=False)  # the interpreter


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def dense_rows(x: Tensor) -> Tensor:
    """``x`` itself when each token's values lie dense, as in a slice of a projection; else a copy."""
    if x.is_contiguous():
        return x
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def launch_key(
    rows: Sequence[Tensor], blocks: Sequence[Tensor | None], others: Sequence[Tensor | None], constants: Hashable
) -> Hashable:
    """Key of a launch for :class:`~ckpt_ops.launcher.Launcher`, or None when Triton has to examine it.

    Args:
        rows: tensors whose pointer and row stride the kernel is specialised for.
        blocks: tensors whose pointer it is specialised for, or None where the kernel gets none.
        others: tensors that enter with their dtype only, or None.
        constants: all else that the compiled form depends on.
    """
    if rows[0].device.type != "cuda":
        return None  # the interpreter compiles nothing
    return compiled_key(rows, blocks, others, constants)


def compiled_key(
    rows: Sequence[Tensor], blocks: Sequence[Tensor | None], others: Sequence[Tensor | None], constants: Hashable
) -> Hashable:
    """:func:`launch_key` of kernels that are never interpreted."""
    if not all(is_aligned(x) and x.stride(0) <= _MAX_STRIDE for x in rows):
        return None
    if any(x is not None and x.data_ptr() % ALIGNMENT for x in blocks):
        return None
    dtypes = tuple(None if x is None else x.dtype for x in (*rows, *blocks, *others))
    return dtypes, constants

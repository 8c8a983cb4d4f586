"""Host side of the Triton kernels: which of them run, and the decode step.

No launch reads a device value, so nothing here syncs: grids are upper bounds made of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import triton
from torch import Tensor

from ckpt_ops import launch_plain
from ckpt_ops.blocks import config_for, dense_rows, device_guard, launch_key
from ckpt_ops.kernels.decode import gdn_decode_kernel
from ckpt_ops.launch_conv import causal_conv1d_decode, causal_conv1d_prefill, conv_gates_decode, conv_gates_prefill
from ckpt_ops.launcher import Launcher
from ckpt_ops.reference import NORM_EPS

__all__ = [
    "causal_conv1d_decode",
    "causal_conv1d_prefill",
    "conv_gates_decode",
    "conv_gates_prefill",
    "gdn_decode",
    "gdn_prefill",
    "two_phase_gdn_prefill",
]

_DECODE = Launcher(gdn_decode_kernel)


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Packed independent sequences; arguments as the registered op."""
    offsets = (0, sources.shape[0])
    return _prefill(q, k, v, g, beta, cu_seqlens, states, sources, destinations, None, offsets, scale)


def two_phase_gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor,
    phase_offsets: Sequence[int],
    scale: float | None = None,
) -> Tensor:
    """A packed forest: one launch for what no state enters, then one launch for each phase that holds a segment."""
    return _prefill(q, k, v, g, beta, cu_seqlens, states, sources, destinations, parents, phase_offsets, scale)


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor | None,
    phase_offsets: Sequence[int],
    scale: float | None,
) -> Tensor:
    out = v.new_empty(v.shape)
    segments = sources.shape[0]
    if segments == 0:
        return out
    q, k, v, g, beta = (dense_rows(x) for x in (q, k, v, g, beta))
    dim_k, dim_v = q.shape[2], v.shape[2]
    config = config_for(q.device, dim_k, dim_v, q.dtype)
    scale = dim_k**-0.5 if scale is None else scale
    hopper = _hopper_launch() if config.hopper else None
    batch = (q, k, v, g, beta, cu_seqlens, states, sources, destinations)
    with device_guard(q.device):
        if hopper is not None and hopper.fits(q.shape[0], segments):
            hopper.prefill(*batch, phase_offsets, scale, out)
        else:
            launch_plain.prefill(*batch, parents, phase_offsets, scale, out, config)
    return out


@lru_cache(maxsize=1)
def _hopper_launch() -> Any:
    """The module of sm_90's own kernels, or None where this Triton lacks what they are written in."""
    try:
        from ckpt_ops import launch_hopper
    except ImportError:
        return None
    return launch_hopper


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    scale: float | None = None,
) -> Tensor:
    """One token for each row, states in place; arguments as the registered op."""
    out = v.new_empty(v.shape)
    rows, heads_v, dim_v = v.shape
    if rows == 0:
        return out
    q, k, v, g, beta = (dense_rows(x) for x in (q, k, v, g, beta))
    dim_k = q.shape[2]
    config = config_for(q.device, dim_k, dim_v, q.dtype)
    scale = dim_k**-0.5 if scale is None else scale
    constants = (q.shape[1], heads_v, dim_k, dim_v, config.block_k, config.decode_block_v, NORM_EPS)
    strides = (q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0))
    with device_guard(q.device):
        _DECODE(
            (rows, heads_v, triton.cdiv(dim_v, config.decode_block_v)),
            launch_key((q, k, v), (states,), (g, beta, slots), constants),
            (q, k, v, g, beta, out, states, slots, *strides, scale, *constants),
            {"num_warps": config.decode_warps},
        )
    return out

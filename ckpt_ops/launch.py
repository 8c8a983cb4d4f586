"""Host side of the Triton kernels: grids and the workspace.

No launch reads a device value, so nothing here syncs: grids are upper bounds made of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckpt_ops.blocks import config_for, dense_rows, device_guard
from ckpt_ops.chunked import MIN_LOG_GATE
from ckpt_ops.kernels.chain import chain_kernel
from ckpt_ops.kernels.decode import gdn_decode_kernel
from ckpt_ops.kernels.intra import intra_kernel
from ckpt_ops.launch_conv import causal_conv1d_decode, causal_conv1d_prefill
from ckpt_ops.reference import NORM_EPS

__all__ = ["causal_conv1d_decode", "causal_conv1d_prefill", "gdn_decode", "gdn_prefill", "two_phase_gdn_prefill"]


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
    (tokens, heads_k, dim_k), (_, heads_v, dim_v) = q.shape, v.shape
    config = config_for(q.device, dim_k, dim_v, q.dtype)
    scale = dim_k**-0.5 if scale is None else scale
    hopper = _hopper_launch() if config.hopper else None
    if hopper is not None:
        with device_guard(q.device):
            hopper.prefill(q, k, v, g, beta, cu_seqlens, states, sources, destinations, phase_offsets, scale, out)
        return out
    chunk = config.chunk
    chunks = tokens // chunk + segments
    # One allocation: 4 vectors in fp32, then T and A in the inputs' dtype, for each chunk and value head.
    vector_size, square_size = chunks * heads_v * 4 * chunk, chunks * heads_v * chunk * chunk
    vectors = q.new_empty(vector_size + 2 * square_size * q.element_size() // 4, dtype=torch.float32)
    squares = vectors[vector_size:].view(q.dtype)
    solve, attend = squares[:square_size], squares[square_size:]
    with device_guard(q.device):
        intra_kernel[(chunks, heads_v)](
            q,
            k,
            g,
            beta,
            cu_seqlens,
            vectors,
            solve,
            attend,
            segments,
            q.stride(0),
            k.stride(0),
            g.stride(0),
            beta.stride(0),
            scale,
            HK=heads_k,
            HV=heads_v,
            DK=dim_k,
            BK=config.block_k,
            BT=chunk,
            MIN_LOG_GATE=MIN_LOG_GATE,
            NORM_EPS=NORM_EPS,
            SOLVE_OPERAND=tl.float32 if q.dtype == torch.float32 else tl.float16,
            num_warps=config.intra_warps,
            num_stages=config.intra_stages,
        )
        for first, last in pairwise(phase_offsets):
            if last == first:
                continue
            chain_kernel[(last - first, heads_v, triton.cdiv(dim_v, config.block_v))](
                q,
                k,
                v,
                out,
                cu_seqlens,
                states,
                sources,
                destinations,
                sources if parents is None else parents,
                vectors,
                solve,
                attend,
                first,
                q.stride(0),
                k.stride(0),
                v.stride(0),
                HK=heads_k,
                HV=heads_v,
                DK=dim_k,
                DV=dim_v,
                BK=config.block_k,
                BV=config.block_v,
                BT=chunk,
                HAS_PARENTS=parents is not None,
                num_warps=config.chain_warps,
                num_stages=config.chain_stages,
            )
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
    with device_guard(q.device):
        gdn_decode_kernel[(rows, heads_v, triton.cdiv(dim_v, config.decode_block_v))](
            q,
            k,
            v,
            g,
            beta,
            out,
            states,
            slots,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            g.stride(0),
            beta.stride(0),
            dim_k**-0.5 if scale is None else scale,
            HK=q.shape[1],
            HV=heads_v,
            DK=dim_k,
            DV=dim_v,
            BK=config.block_k,
            BV=config.decode_block_v,
            NORM_EPS=NORM_EPS,
            num_warps=config.decode_warps,
        )
    return out

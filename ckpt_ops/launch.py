"""Host side of the Triton kernels: grids, the workspace and the block sizes for each architecture.

No launch reads a device value, so nothing here syncs: grids are upper bounds made of shapes. Block sizes depend on the
architecture, the head dimensions and the dtype only, never on the batch, so that a sequence's result is the same, to
the bit, whatever runs beside it. There is no autotuning: it would run kernels that write states many times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ContextManager

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckpt_ops.chunked import CHUNK, MIN_LOG_GATE
from ckpt_ops.kernels.chain import chain_kernel
from ckpt_ops.kernels.conv import conv_prefill_kernel
from ckpt_ops.kernels.decode import conv_decode_kernel, gdn_decode_kernel
from ckpt_ops.kernels.intra import intra_kernel
from ckpt_ops.reference import NORM_EPS

CONV_TILE = 64
CONV_CHANNELS = 64
DECODE_CHANNELS = 256


@dataclass(frozen=True, slots=True)
class Config:
    """Block sizes of the delta rule kernels: chunk length, BK and BV that pad D_k and slice D_v, warps and stages."""

    chunk: int
    block_k: int
    block_v: int
    intra_warps: int
    intra_stages: int
    chain_warps: int
    chain_stages: int
    decode_block_v: int
    decode_warps: int


def choose_config(capability: int, dim_k: int, dim_v: int, dtype: torch.dtype) -> Config:
    """Block sizes for ``capability`` (90 for sm_90), chosen so that shared memory fits: 163 KiB a block on sm_80,
    99 KiB on sm_86 and sm_89, 227 KiB on sm_90 and sm_100."""
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (dim_k, dim_v))
    half = dtype != torch.float32
    small = capability in (86, 89, 120, 121)
    # fp32 products run on the FMA units, which hold whole operands in registers: shorter chunks and thinner slices.
    limit_v, chunk = (64, CHUNK) if half else (16, 32)
    if block_k > 128:
        limit_v, chunk = (32, CHUNK) if half else (16, 16)
    return Config(
        chunk=chunk,
        block_k=block_k,
        block_v=min(block_v, limit_v),
        intra_warps=4,
        intra_stages=1,
        chain_warps=4,
        chain_stages=2 if half and not small and block_k <= 128 else 1,
        decode_block_v=min(block_v, 32),
        decode_warps=4,
    )


@lru_cache(maxsize=256)
def _config(device: torch.device, dim_k: int, dim_v: int, dtype: torch.dtype) -> Config:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return choose_config(10 * major + minor, dim_k, dim_v, dtype)
    return choose_config(90, dim_k, dim_v, dtype)  # the interpreter


def _guard(device: torch.device) -> ContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _dense_rows(x: Tensor) -> Tensor:
    """``x`` itself when each token's values lie dense, as in a slice of a projection; else a copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


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
    q, k, v, g, beta = (_dense_rows(x) for x in (q, k, v, g, beta))
    (tokens, heads_k, dim_k), (_, heads_v, dim_v) = q.shape, v.shape
    config = _config(q.device, dim_k, dim_v, q.dtype)
    chunk = config.chunk
    chunks = tokens // chunk + segments
    # One allocation: 4 vectors in fp32, then T and A in the inputs' dtype, for each chunk and value head.
    vector_size, square_size = chunks * heads_v * 4 * chunk, chunks * heads_v * chunk * chunk
    vectors = q.new_empty(vector_size + 2 * square_size * q.element_size() // 4, dtype=torch.float32)
    squares = vectors[vector_size:].view(q.dtype)
    solve, attend = squares[:square_size], squares[square_size:]
    with _guard(q.device):
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
            dim_k**-0.5 if scale is None else scale,
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
    q, k, v, g, beta = (_dense_rows(x) for x in (q, k, v, g, beta))
    dim_k = q.shape[2]
    config = _config(q.device, dim_k, dim_v, q.dtype)
    with _guard(q.device):
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


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor,
    activation: str | None = None,
) -> Tensor:
    """A packed forest in one launch; arguments as the registered op."""
    out = x.new_empty(x.shape)
    segments, (tokens, channels), width = sources.shape[0], x.shape, weight.shape[1]
    if segments == 0:
        return out
    x = _dense_rows(x)
    with _guard(x.device):
        conv_prefill_kernel[(tokens // CONV_TILE + segments, triton.cdiv(channels, CONV_CHANNELS))](
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            cu_seqlens,
            states,
            sources,
            destinations,
            parents,
            segments,
            x.stride(0),
            C=channels,
            W=width,
            BW=triton.next_power_of_2(width - 1),
            BT=CONV_TILE,
            BC=CONV_CHANNELS,
            HAS_BIAS=bias is not None,
            SILU=activation == "silu",
            num_warps=4,
        )
    return out


def causal_conv1d_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    activation: str | None = None,
) -> Tensor:
    """One token for each row, histories in place; arguments as the registered op."""
    out = x.new_empty(x.shape)
    (rows, channels), width = x.shape, weight.shape[1]
    if rows == 0:
        return out
    x = _dense_rows(x)
    with _guard(x.device):
        conv_decode_kernel[(rows, triton.cdiv(channels, DECODE_CHANNELS))](
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            states,
            slots,
            x.stride(0),
            C=channels,
            W=width,
            BW=triton.next_power_of_2(width - 1),
            BC=DECODE_CHANNELS,
            HAS_BIAS=bias is not None,
            SILU=activation == "silu",
            num_warps=4,
        )
    return out

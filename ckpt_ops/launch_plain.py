"""Host side of the delta rule's plain Triton kernels, which run on every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckpt_ops.blocks import Config, launch_key
from ckpt_ops.chunked import MIN_LOG_GATE
from ckpt_ops.kernels.chain import chain_kernel
from ckpt_ops.kernels.intra import intra_kernel
from ckpt_ops.launcher import Launcher
from ckpt_ops.reference import NORM_EPS

_INTRA, _CHAIN = Launcher(intra_kernel), Launcher(chain_kernel)


def prefill(
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
    scale: float,
    out: Tensor,
    config: Config,
) -> None:
    """Run a packed forest of at least one segment into ``out``, on the current device: one launch for what no state
    enters, then one for each phase that holds a segment."""
    (tokens, heads_k, dim_k), (_, heads_v, dim_v) = q.shape, v.shape
    segments, chunk = sources.shape[0], config.chunk
    chunks = tokens // chunk + segments
    # One allocation: 4 vectors in fp32, then T and A in the inputs' dtype, for each chunk and value head.
    vector_size, square_size = chunks * heads_v * 4 * chunk, chunks * heads_v * chunk * chunk
    vectors = q.new_empty(vector_size + 2 * square_size * q.element_size() // 4, dtype=torch.float32)
    squares = vectors[vector_size:].view(q.dtype)
    solve, attend = squares[:square_size], squares[square_size:]
    operand = tl.float32 if q.dtype == torch.float32 else tl.float16
    constants = (heads_k, heads_v, dim_k, config.block_k, chunk, MIN_LOG_GATE, NORM_EPS, operand)
    strides = (q.stride(0), k.stride(0), g.stride(0), beta.stride(0))
    _INTRA(
        (chunks, heads_v, 1),
        launch_key((q, k), (), (g, beta, cu_seqlens), constants),
        (q, k, g, beta, cu_seqlens, vectors, solve, attend, segments, *strides, scale, *constants),
        {"num_warps": config.intra_warps, "num_stages": config.intra_stages},
    )
    sizes = (heads_k, heads_v, dim_k, dim_v, config.block_k, config.block_v, chunk)
    constants = (*sizes, parents is not None)
    key = launch_key((q, k, v), (states,), (cu_seqlens,), constants)
    links = (cu_seqlens, states, sources, destinations, sources if parents is None else parents)
    for first, last in pairwise(phase_offsets):
        if last > first:
            _CHAIN(
                (last - first, heads_v, triton.cdiv(dim_v, config.block_v)),
                key,
                (q, k, v, out, *links, vectors, solve, attend, first, *strides[:2], v.stride(0), *constants),
                {"num_warps": config.chain_warps, "num_stages": config.chain_stages},
            )

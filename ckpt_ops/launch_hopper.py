"""Host side of the kernels for sm_90: what runs in which launch, and how many programs each gets.

Each launch but the first starts while the one before still runs (programmatic dependent launch), and waits for it on
the device, where it needs its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ckpt_ops.blocks import compiled_key
from ckpt_ops.chunked import CHUNK, MIN_LOG_GATE
from ckpt_ops.kernels.hopper_chain import hopper_chain_kernel
from ckpt_ops.kernels.hopper_intra import hopper_intra_kernel
from ckpt_ops.launcher import Launcher, is_aligned
from ckpt_ops.reference import NORM_EPS

BLOCK_V = 64
STAGES = 2
RECORD = 2 * CHUNK * CHUNK + 8 * CHUNK
"""Elements of one chunk and value head in the workspace: T, A, and four vectors in fp32."""
_MAX_CHUNKS = 65535
_INTRA, _CHAIN = Launcher(hopper_intra_kernel), Launcher(hopper_chain_kernel)
_INTRA_OPTIONS = {"num_warps": 4, "maxnreg": 128, "launch_pdl": False}
_LATE_INTRA_OPTIONS = _INTRA_OPTIONS | {"launch_pdl": True}
_CHAIN_OPTIONS = {"num_warps": 4, "launch_pdl": True}


def fits(tokens: int, segments: int) -> bool:
    """Whether the chunks of so many packed tokens fit into a grid's second dimension."""
    return tokens // CHUNK + segments <= _MAX_CHUNKS


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
    phase_offsets: Sequence[int],
    scale: float,
    out: Tensor,
) -> None:
    """Run a packed forest into ``out``, on the current device; arguments as the registered op, tokens dense, and
    ``sources`` of children their parents' destinations."""
    q, k, v = _aligned_rows(q), _aligned_rows(k), _aligned_rows(v)
    (tokens, heads_k, dim_k), (_, heads_v, dim_v) = q.shape, v.shape
    segments = sources.shape[0]
    chunks = tokens // CHUNK + segments
    records = q.new_empty(chunks * heads_v * RECORD)
    intra_inputs = (q, k, g, beta, cu_seqlens, records)
    chain_inputs = (q, k, v, out, cu_seqlens, states, sources, destinations, records)
    intra_pointers, chain_pointers = _pointers(intra_inputs), _pointers(chain_inputs)
    intra_strides = (q.stride(0), k.stride(0), g.stride(0), beta.stride(0), scale)
    chain_strides = (q.stride(0), k.stride(0), v.stride(0))
    intra_constants = (heads_k, heads_v, dim_k, CHUNK, MIN_LOG_GATE, NORM_EPS)
    chain_constants = (heads_k, heads_v, dim_k, dim_v, BLOCK_V, CHUNK, STAGES)
    key = compiled_key((q, k, v), (states, cu_seqlens, sources, destinations), (g, beta), chain_constants)
    late_key = None if key is None else (key, "late")
    units = _multiprocessors(q.device)
    items = heads_v * (dim_v // BLOCK_V)

    def intra(first: int, last: int, late: bool) -> None:
        arguments = (*intra_inputs, segments, first, last, *intra_strides, *intra_constants, late)
        options = _LATE_INTRA_OPTIONS if late else _INTRA_OPTIONS
        _INTRA((heads_v, chunks, 1), late_key if late else key, arguments, options, intra_pointers)

    def chain(first: int, last: int) -> None:
        share = -(-(last - first) * items // units)
        arguments = (*chain_inputs, first, last - first, share, *chain_strides, *chain_constants)
        programs = -(-(last - first) * items // share)
        _CHAIN((programs, 1, 1), key, arguments, _CHAIN_OPTIONS, chain_pointers)

    phases = [(first, last) for first, last in pairwise(phase_offsets) if last > first]
    if len(phases) > 1 and phases[0][1] * items < units and chunks * heads_v > 2 * units:
        # The first walk leaves multiprocessors idle: all that the later phases need beside states runs there meanwhile.
        intra(*phases[0], late=False)
        chain(*phases[0])
        intra(phases[1][0], segments, late=True)
    else:
        intra(0, segments, late=False)
        chain(*phases[0])
    for phase in phases[1:]:
        chain(*phase)


def _pointers(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple([x.data_ptr() for x in tensors])


def _aligned_rows(x: Tensor) -> Tensor:
    """``x``, whose tokens are dense, itself if they begin at multiples of 16 elements; else a copy in which they do."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

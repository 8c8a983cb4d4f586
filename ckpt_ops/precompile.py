"""Compiling all kernels for a model's shapes before the first request, by running tiny batches."""

from __future__ import annotations

import torch
from torch import Tensor

from ckpt_ops.api import gdn_decode, gdn_prefill, two_phase_gdn_prefill
from ckpt_ops.api_conv import causal_conv1d_decode, causal_conv1d_prefill, conv_gates_decode, conv_gates_prefill
from ckpt_ops.segments import Segment, SegmentTable

_ROWS = 2


def warmup(
    heads_k: int,
    heads_v: int,
    dim_k: int,
    dim_v: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
    conv_width: int = 4,
    device: torch.device | str | None = None,
) -> None:
    """Compile every kernel that a model of these shapes launches, so that no request waits for the compiler.

    Compiled forms do not depend on the batch: after this, steps of any size only launch. Call it once a process, before
    a CUDA graph is captured: compiling is not allowed during a capture. It allocates a few MiB and runs in seconds, or
    in milliseconds when Triton's cache on disk holds the kernels; processes that start together may share that cache.
    Does nothing on a CPU.

    Args:
        heads_k, heads_v: H_k and H_v, numbers of key and of value heads.
        dim_k, dim_v: D_k and D_v, dimensions of a key and of a value head.
        dtype: of tokens, of the convolution's weight and of its pool: bfloat16, float16 or float32.
        state_dtype: of the pool of recurrent states.
        conv_width: W, number of taps of the convolution, which has no bias and ends in SiLU.
        device: a CUDA device; the current one by default, or the CPU where there is none.

    Raises:
        ArgumentError: a shape or dtype that the ops do not take.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return
    units = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.no_grad():
        run_all(heads_k, heads_v, dim_k, dim_v, dtype, state_dtype, conv_width, device, crowd=2 * units)


def run_all(
    heads_k: int,
    heads_v: int,
    dim_k: int,
    dim_v: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    conv_width: int,
    device: torch.device,
    crowd: int,
) -> None:
    """Every op on every kind of batch that has kernels of its own: few segments and ``crowd`` of them, with and without
    Consumers, gates' parameters in fp32 and in ``dtype``. ``crowd``: twice the multiprocessors, from where on the later
    phases' chunks are launched beside the first walk, even with one value head."""
    sizes = [heads_k * dim_k, heads_k * dim_k, heads_v * dim_v]
    channels = sum(sizes)
    recurrent = torch.zeros(2, heads_v, dim_k, dim_v, dtype=state_dtype, device=device)
    histories = torch.zeros(2, channels, conv_width - 1, dtype=dtype, device=device)
    weight = torch.zeros(channels, conv_width, dtype=dtype, device=device)

    def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.zeros(count, channels, dtype=dtype, device=device)
        a = torch.zeros(count, heads_v, dtype=dtype, device=device)
        return x, a, a

    def heads(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = mixed.split(sizes, -1)
        return q.unflatten(1, (heads_k, dim_k)), k.unflatten(1, (heads_k, dim_k)), v.unflatten(1, (heads_v, dim_v))

    root = [Segment(1, destination=0)]
    for count in (1, crowd):
        alone = SegmentTable.build([Segment(1)] * count, 2, device)
        shared = SegmentTable.build(root + [Segment(1, parent=0)] * count, 2, device)
        for parameters in (torch.float32, dtype):
            rates = torch.zeros(heads_v, dtype=parameters, device=device)
            for table in (alone, shared):
                x, a, b = tokens(table.num_tokens)
                causal_conv1d_prefill(x, weight, None, histories, table, activation="silu")
                mixed, g, beta = conv_gates_prefill(
                    x, weight, None, a, b, rates, rates, histories, table, activation="silu"
                )
                two_phase_gdn_prefill(*heads(mixed), g, beta, recurrent, table)
            x, a, b = tokens(alone.num_tokens)
            gdn_prefill(*heads(x), a.float(), b, recurrent, alone)
            slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
            x, a, b = tokens(_ROWS)
            causal_conv1d_decode(x, weight, None, histories, slots, activation="silu")
            mixed, g, beta = conv_gates_decode(x, weight, None, a, b, rates, rates, histories, slots, activation="silu")
            gdn_decode(*heads(mixed), g, beta, recurrent, slots)

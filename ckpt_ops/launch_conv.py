"""Host side of the convolution's Triton kernels. No launch reads a device value, so nothing here syncs."""

from __future__ import annotations

import triton
from torch import Tensor

from ckpt_ops.blocks import dense_rows, device_guard
from ckpt_ops.kernels.conv import conv_prefill_kernel
from ckpt_ops.kernels.decode import conv_decode_kernel

TILE = 16
CHANNELS = 512
DECODE_CHANNELS = 256


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
    x = dense_rows(x)
    block = min(CHANNELS, triton.next_power_of_2(channels))
    weight = weight.contiguous()
    with device_guard(x.device):
        conv_prefill_kernel[(tokens // TILE + segments, triton.cdiv(channels, block))](
            x,
            weight,
            None if bias is None else bias.contiguous(),
            out,
            cu_seqlens,
            states,
            sources,
            destinations,
            parents,
            None,
            None,
            None,
            None,
            None,
            None,
            segments,
            x.stride(0),
            0,
            0,
            C=channels,
            W=width,
            BT=TILE,
            BC=block,
            HV=0,
            BH=1,
            HAS_BIAS=bias is not None,
            SILU=activation == "silu",
            PACKED=width == 4 and weight.element_size() == 2 and weight.data_ptr() % 8 == 0,
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
    x = dense_rows(x)
    with device_guard(x.device):
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

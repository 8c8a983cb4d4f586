"""Host side of the convolution's Triton kernels. No launch reads a device value, so nothing here syncs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ckpt_ops.blocks import dense_rows, device_guard, launch_key
from ckpt_ops.kernels.conv import conv_prefill_kernel
from ckpt_ops.kernels.decode import conv_decode_kernel
from ckpt_ops.launcher import Launcher

TILE = 16
CHANNELS = 512
DECODE_CHANNELS = 256
_WARPS = {"num_warps": 4}

_PREFILL, _DECODE = Launcher(conv_prefill_kernel), Launcher(conv_decode_kernel)


@dataclass(frozen=True, slots=True)
class _Gates:
    """What the kernels compute gates from and write them to; all None where only tokens are convolved."""

    a: Tensor | None = None
    b: Tensor | None = None
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    g: Tensor | None = None
    beta: Tensor | None = None

    @classmethod
    def make(cls, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> _Gates:
        a, b = dense_rows(a), dense_rows(b)
        g, beta = a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)
        return cls(a, b, a_log.contiguous(), dt_bias.contiguous(), g, beta)

    def results(self) -> tuple[Tensor, Tensor]:
        assert self.g is not None and self.beta is not None
        return self.g, self.beta

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.a, self.b, self.a_log, self.dt_bias, self.g, self.beta

    def strides(self) -> tuple[int, int]:
        return (0, 0) if self.a is None or self.b is None else (self.a.stride(0), self.b.stride(0))

    def heads(self) -> tuple[int, int]:
        """Their number, and the power of two that covers it."""
        count = 0 if self.a is None else self.a.shape[1]
        return count, triton.next_power_of_2(max(1, count))


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
    return _prefill(x, weight, bias, _Gates(), cu_seqlens, states, sources, destinations, parents, activation)


def conv_gates_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A packed forest and its gates in one launch; arguments as the registered op."""
    gates = _Gates.make(a, b, a_log, dt_bias)
    out = _prefill(x, weight, bias, gates, cu_seqlens, states, sources, destinations, parents, activation)
    return out, *gates.results()


def causal_conv1d_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, activation: str | None = None
) -> Tensor:
    """One token for each row, histories in place; arguments as the registered op."""
    return _decode(x, weight, bias, _Gates(), states, slots, activation)


def conv_gates_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token for each row and its gates in one launch; arguments as the registered op."""
    gates = _Gates.make(a, b, a_log, dt_bias)
    return _decode(x, weight, bias, gates, states, slots, activation), *gates.results()


def _prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: _Gates,
    cu_seqlens: Tensor,
    states: Tensor,
    sources: Tensor,
    destinations: Tensor,
    parents: Tensor,
    activation: str | None,
) -> Tensor:
    out = x.new_empty(x.shape)
    segments, (tokens, channels), width = sources.shape[0], x.shape, weight.shape[1]
    if segments == 0:
        return out
    x, weight, bias = dense_rows(x), weight.contiguous(), None if bias is None else bias.contiguous()
    block = min(CHANNELS, triton.next_power_of_2(channels))
    packed = width == 4 and weight.element_size() == 2 and weight.data_ptr() % 8 == 0
    constants = (channels, width, TILE, block, *gates.heads(), bias is not None, activation == "silu", packed)
    key = launch_key((x,), (weight, bias, states), (*gates.tensors(), cu_seqlens), constants)
    links = (cu_seqlens, states, sources, destinations, parents)
    numbers = (segments, x.stride(0), *gates.strides())
    with device_guard(x.device):
        _PREFILL(
            (tokens // TILE + segments, triton.cdiv(channels, block), 1),
            key,
            (x, weight, bias, out, *links, *gates.tensors(), *numbers, *constants),
            _WARPS,
        )
    return out


def _decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: _Gates,
    states: Tensor,
    slots: Tensor,
    activation: str | None,
) -> Tensor:
    out = x.new_empty(x.shape)
    (rows, channels), width = x.shape, weight.shape[1]
    if rows == 0:
        return out
    x, weight, bias = dense_rows(x), weight.contiguous(), None if bias is None else bias.contiguous()
    taps = (width, triton.next_power_of_2(width - 1))
    constants = (channels, *taps, DECODE_CHANNELS, *gates.heads(), bias is not None, activation == "silu")
    key = launch_key((x,), (weight, bias, states), (*gates.tensors(), slots), constants)
    numbers = (x.stride(0), *gates.strides())
    with device_guard(x.device):
        _DECODE(
            (rows, triton.cdiv(channels, DECODE_CHANNELS), 1),
            key,
            (x, weight, bias, out, states, slots, *gates.tensors(), *numbers, *constants),
            _WARPS,
        )
    return out

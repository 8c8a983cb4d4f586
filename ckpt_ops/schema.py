"""Registers the seven ops in ``torch.ops.ckpt_ops``: schema, fake kernel, CPU and CUDA implementation.

Schemas are written by hand and registered with ``define`` / ``impl`` because that boundary costs a tenth of
``custom_op``'s. Outputs are made by ``new_empty(shape)`` in the fakes and contiguous in every implementation, so that
the strides that the compiler assumes are the strides that it gets. Triton is imported when the first CUDA tensor
arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ckpt_ops import chunked, shortconv

_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def _register(
    name: str, signature: str, cpu: Callable[..., Any], fake: Callable[..., Any], result: str = "Tensor"
) -> None:
    def cuda(*args: Any) -> Any:
        from ckpt_ops import launch

        return getattr(launch, name)(*args)

    qualified = f"ckpt_ops::{name}"
    torch.library.define(qualified, f"({signature}) -> {result}", tags=_TAGS)
    torch.library.impl(qualified, "cpu", cpu)
    torch.library.impl(qualified, "cuda", cuda)
    torch.library.register_fake(qualified, fake)


def _fake_delta_rule(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return v.new_empty(v.shape)


def _fake_conv(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_conv_gates(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)


_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_CONV = "Tensor x, Tensor weight, Tensor? bias"
_GATES = "Tensor a, Tensor b, Tensor a_log, Tensor dt_bias"
_PACKED = "Tensor cu_seqlens, Tensor(a!) states, Tensor sources, Tensor destinations"
_ROWS = "Tensor(a!) states, Tensor slots"

_register("gdn_prefill", f"{_TOKENS}, {_PACKED}, float? scale=None", chunked.gdn_prefill, _fake_delta_rule)
_register(
    "two_phase_gdn_prefill",
    f"{_TOKENS}, {_PACKED}, Tensor parents, SymInt[] phase_offsets, float? scale=None",
    chunked.two_phase_gdn_prefill,
    _fake_delta_rule,
)
_register("gdn_decode", f"{_TOKENS}, {_ROWS}, float? scale=None", chunked.gdn_decode, _fake_delta_rule)
_register(
    "causal_conv1d_prefill",
    f"{_CONV}, {_PACKED}, Tensor parents, str? activation=None",
    shortconv.causal_conv1d_prefill,
    _fake_conv,
)
_register("causal_conv1d_decode", f"{_CONV}, {_ROWS}, str? activation=None", shortconv.causal_conv1d_decode, _fake_conv)
_register(
    "conv_gates_prefill",
    f"{_CONV}, {_GATES}, {_PACKED}, Tensor parents, str? activation=None",
    shortconv.conv_gates_prefill,
    _fake_conv_gates,
    "(Tensor, Tensor, Tensor)",
)
_register(
    "conv_gates_decode",
    f"{_CONV}, {_GATES}, {_ROWS}, str? activation=None",
    shortconv.conv_gates_decode,
    _fake_conv_gates,
    "(Tensor, Tensor, Tensor)",
)

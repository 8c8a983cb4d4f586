"""The public functions of the short convolution, alone and with the gates of the delta rule beside it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ckpt_ops import schema  # noqa: F401  (registers torch.ops.ckpt_ops)
from ckpt_ops.checks import check_conv, check_gate_inputs, check_slots, check_table
from ckpt_ops.segments import SegmentTable

Activation = Literal["silu"] | None


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    table: SegmentTable,
    *,
    activation: Activation = None,
) -> Tensor:
    """Depthwise causal convolution over a packed forest; histories are read from and written to their slots.

    Args:
        x: ``[T, C]``, fp32, bf16 or fp16 (fp64 on a CPU).
        weight: ``[C, W]``, any float dtype, ``W`` from 2 to 8; column ``W - 1`` meets the current token.
        bias: ``[C]`` or None.
        states: pool ``[num_slots, C, W - 1]``, contiguous, mutated; column ``W - 2`` is the newest token.
        table: the batch.
        activation: None or ``"silu"``.

    Returns:
        ``[T, C]`` in ``x``'s dtype.

    Raises:
        ArgumentError: a shape, dtype, device or the activation is wrong.
    """
    check_conv(x, weight, bias, states, activation)
    check_table(table, x, "x", states)
    out: Tensor = torch.ops.ckpt_ops.causal_conv1d_prefill(
        x, weight, bias, table.cu_seqlens, states, table.sources, table.destinations, table.parents, activation
    )
    return out


def causal_conv1d_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, *, activation: Activation = None
) -> Tensor:
    """One token of the convolution for each of B running sequences, histories in place.

    Args:
        x, weight, bias, states, activation: as in :func:`causal_conv1d_prefill`, with B rows.
        slots: as in :func:`ckpt_ops.gdn_decode`.

    Returns:
        ``[B, C]`` in ``x``'s dtype.
    """
    check_conv(x, weight, bias, states, activation)
    check_slots(slots, x, "x")
    out: Tensor = torch.ops.ckpt_ops.causal_conv1d_decode(x, weight, bias, states, slots, activation)
    return out


def conv_gates_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    table: SegmentTable,
    *,
    activation: Activation = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`causal_conv1d_prefill` and, in the same launch, the gates that the delta rule takes.

    ``g = -exp(a_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``, computed in fp32 and accurate relative to each
    value, however negative ``a``.

    Args:
        x, weight, bias, states, table, activation: as in :func:`causal_conv1d_prefill`.
        a, b: ``[T, H_v]``, any float dtype.
        a_log, dt_bias: ``[H_v]``, any float dtype.

    Returns:
        ``mixed [T, C]`` in ``x``'s dtype, ``g [T, H_v]`` in fp32, ``beta [T, H_v]`` in ``b``'s dtype.

    Raises:
        ArgumentError: a shape, dtype, device or the activation is wrong.
    """
    check_conv(x, weight, bias, states, activation)
    check_gate_inputs(x, a, b, a_log, dt_bias)
    check_table(table, x, "x", states)
    gates = (a, b, a_log, dt_bias)
    links = (table.sources, table.destinations, table.parents)
    mixed, g, beta = torch.ops.ckpt_ops.conv_gates_prefill(
        x, weight, bias, *gates, table.cu_seqlens, states, *links, activation
    )
    return mixed, g, beta


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
    *,
    activation: Activation = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`causal_conv1d_decode` and, in the same launch, the gates that :func:`gdn_decode` takes.

    Args:
        x, weight, bias, states, activation: as in :func:`causal_conv1d_prefill`, with B rows.
        a, b, a_log, dt_bias: as in :func:`conv_gates_prefill`, with B rows.
        slots: as in :func:`ckpt_ops.gdn_decode`. Gates are computed for rows of slot -1 too.

    Returns:
        ``mixed [B, C]``, ``g [B, H_v]`` and ``beta [B, H_v]``, dtypes as in :func:`conv_gates_prefill`.

    Raises:
        ArgumentError: a shape, dtype, device or the activation is wrong.
    """
    check_conv(x, weight, bias, states, activation)
    check_gate_inputs(x, a, b, a_log, dt_bias)
    check_slots(slots, x, "x")
    mixed, g, beta = torch.ops.ckpt_ops.conv_gates_decode(
        x, weight, bias, a, b, a_log, dt_bias, states, slots, activation
    )
    return mixed, g, beta

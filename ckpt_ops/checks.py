"""Host checks of the public functions' arguments: shapes, dtypes and devices, never values."""

from __future__ import annotations

import torch
from torch import Tensor

from ckpt_ops.errors import ArgumentError
from ckpt_ops.segments import SegmentTable

MAX_HEAD_DIM = 256
MAX_CONV_WIDTH = 8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> None:
    _check_tensor("q", q, 3, q)
    _check_tensor("v", v, 3, q)
    _check_tensor("k", k, 3, q)
    _check_shape("k", k, tuple(q.shape), "q's shape")
    heads, dim_k = q.shape[1:]
    tokens, value_heads, dim_v = v.shape
    if tokens != q.shape[0]:
        raise ArgumentError(f"v must have one row for each of q's {q.shape[0]} tokens, got {tokens}")
    if heads < 1 or value_heads < 1 or value_heads % heads:
        raise ArgumentError(f"v's head count must be a positive multiple of q's {heads}, got {value_heads}")
    for name, dim in (("q", dim_k), ("v", dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ArgumentError(f"{name}'s head dimension must be from 1 to {MAX_HEAD_DIM}, got {dim}")
    for name, value in (("k", k), ("v", v)):
        if value.dtype != q.dtype:
            raise ArgumentError(f"{name} must have q's dtype {q.dtype}, got {value.dtype}")
    for name, value in (("g", g), ("beta", beta)):
        _check_tensor(name, value, 2, q)
        _check_shape(name, value, (tokens, value_heads), "[T, H_v]")
    _check_pool(states, (value_heads, dim_k, dim_v), "[num_slots, H_v, D_k, D_v]", q)


def check_conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, activation: str | None) -> None:
    _check_tensor("x", x, 2, x)
    _check_tensor("weight", weight, 2, x)
    channels, width = weight.shape
    if channels != x.shape[1] or not 2 <= width <= MAX_CONV_WIDTH:
        raise ArgumentError(
            f"weight must be [C, W] with C = {x.shape[1]} as in x and W from 2 to {MAX_CONV_WIDTH}, got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None:
        _check_tensor("bias", bias, 1, x)
        _check_shape("bias", bias, (channels,), "[C]")
    if activation not in (None, "silu"):
        raise ArgumentError(f"activation must be None or 'silu', got {activation!r}")
    _check_pool(states, (channels, width - 1), "[num_slots, C, W - 1]", x)


def check_gate_inputs(x: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    for name, value in (("a", a), ("b", b)):
        _check_tensor(name, value, 2, x)
    shape = (x.shape[0], a.shape[1])
    if a.shape[1] < 1:
        raise ArgumentError(f"a must be [T, H_v] with at least one head, got {tuple(a.shape)}")
    _check_shape("a", a, shape, "[T, H_v] with x's rows")
    _check_shape("b", b, shape, "a's shape")
    for name, value in (("a_log", a_log), ("dt_bias", dt_bias)):
        _check_tensor(name, value, 1, x)
        _check_shape(name, value, shape[1:], "[H_v] as in a")


def _check_tensor(name: str, value: Tensor, dims: int, like: Tensor) -> None:
    check_strided(name, value)
    if value.dim() != dims:
        raise ArgumentError(f"{name} must have {dims} dimensions, got shape {tuple(value.shape)}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name} requires a gradient, and the ops have none; call them under torch.no_grad()")
    if value.dtype not in _FLOATS or (value.dtype == torch.float64 and value.device.type == "cuda"):
        raise ArgumentError(f"{name} must be float32, bfloat16 or float16 (float64 on a CPU only), got {value.dtype}")
    if value.device != like.device:
        raise ArgumentError(f"{name} must be on {like.device} with the other arguments, got {value.device}")


def check_strided(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:  # the kernels take addresses and strides
        raise ArgumentError(f"{name} must be a dense tensor (torch.strided), got layout {value.layout}")


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(value.shape) != shape:
        raise ArgumentError(f"{name} must have shape {shape} ({meaning}), got {tuple(value.shape)}")


def _check_pool(states: Tensor, shape: tuple[int, ...], meaning: str, like: Tensor) -> None:
    _check_tensor("states", states, len(shape) + 1, like)
    if tuple(states.shape[1:]) != shape:
        raise ArgumentError(f"states must be {meaning} with trailing {shape}, got {tuple(states.shape)}")
    if not states.is_contiguous():
        raise ArgumentError(f"states must be contiguous, got strides {states.stride()} for {tuple(states.shape)}")


def check_table(table: SegmentTable, tokens: Tensor, name: str, states: Tensor) -> None:
    if not isinstance(table, SegmentTable):
        raise ArgumentError(f"table must be a SegmentTable, got {type(table).__name__}")
    if table.num_tokens != tokens.shape[0]:
        raise ArgumentError(f"{name} must have the table's {table.num_tokens} tokens, got {tokens.shape[0]}")
    if table.num_slots > states.shape[0]:
        raise ArgumentError(
            f"states must have at least the {table.num_slots} slots that the table was built for, got {states.shape[0]}"
        )
    if table.cu_seqlens.device != tokens.device:
        raise ArgumentError(f"table must be on {tokens.device} with {name}, got {table.cu_seqlens.device}")


def rows_in_use(slots: Tensor, num_slots: int) -> Tensor:
    """Rows of a decode step whose slot is not -1, int64; refuses slots that a kernel would write out of bounds or in
    any order. Reads values, so it is for a CPU, where that costs nothing."""
    rows = torch.nonzero(slots != -1).flatten()
    held: list[int] = slots[rows].tolist()
    for row, slot in zip(rows.tolist(), held, strict=True):
        if not 0 <= slot < num_slots:
            raise ArgumentError(f"slots[{row}] must be -1 or from 0 to {num_slots - 1}, got {slot}")
    if len(set(held)) < len(held):
        raise ArgumentError(f"slots other than -1 must differ, got {slots.tolist()}")
    return rows


def check_slots(slots: Tensor, tokens: Tensor, name: str) -> None:
    check_strided("slots", slots)
    if slots.dtype != torch.int32 or tuple(slots.shape) != (tokens.shape[0],):
        raise ArgumentError(
            f"slots must be int32 with one entry for each of {name}'s {tokens.shape[0]} rows, got {slots.dtype} "
            f"{tuple(slots.shape)}"
        )
    if slots.device != tokens.device:
        raise ArgumentError(f"slots must be on {tokens.device} with {name}, got {slots.device}")

"""Host side of the decode attention's Triton kernels. No launch reads a device value, so nothing here syncs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ckpt_ops.blocks import device_guard, launch_key
from ckpt_ops.kernels.attention import attention_combine_kernel, attention_split_kernel
from ckpt_ops.launcher import Launcher

_WARPS = {"num_warps": 4}
_SPLIT, _COMBINE = Launcher(attention_split_kernel), Launcher(attention_combine_kernel)
SPLITS = 16
"""Shares of a request's rows: enough programs for one request alone to use most of a GPU's memory bandwidth."""


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lines: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Two launches; arguments as :func:`ckpt_ops.attention.decode_attention`."""
    batch, heads, dim = query.shape
    kv_heads = keys.shape[1]
    out = query.new_empty((batch, heads, dim))
    if batch == 0:
        return out
    if query.stride(2) != 1:
        query = query.contiguous()
    partial = query.new_empty((batch, heads, SPLITS, dim), dtype=torch.float32)
    lse = query.new_empty((batch, heads, SPLITS), dtype=torch.float32)
    block_d, group = max(16, triton.next_power_of_2(dim)), heads // kv_heads
    block_n = 64 if query.dtype != torch.float32 else 16
    constants = (kv_heads, group, dim, max(16, triton.next_power_of_2(group)), block_d, block_n, SPLITS)
    key = launch_key((query,), (keys, values), (table,), constants)
    numbers = (query.stride(0), query.stride(1), table.stride(0), scale)
    with device_guard(query.device):
        _SPLIT(
            (batch, kv_heads, SPLITS),
            key,
            (query, keys, values, table, lines, positions, partial, lse, *numbers, *constants),
            _WARPS,
        )
        combined = (dim, block_d, SPLITS, triton.next_power_of_2(SPLITS))
        key = launch_key((out,), (), (), combined)
        _COMBINE((batch * heads, 1, 1), key, (partial, lse, out, *combined), _WARPS)
    return out

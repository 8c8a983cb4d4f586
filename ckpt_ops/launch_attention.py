"""Host side of the decode attention's Triton kernels. No launch reads a device value, so nothing here syncs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ckpt_ops.blocks import device_guard
from ckpt_ops.kernels.attention import attention_combine_kernel, attention_split_kernel

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
    block_d = max(16, triton.next_power_of_2(dim))
    with device_guard(query.device):
        attention_split_kernel[(batch, kv_heads, SPLITS)](
            query,
            keys,
            values,
            table,
            lines,
            positions,
            partial,
            lse,
            query.stride(0),
            query.stride(1),
            table.stride(0),
            scale,
            HKV=kv_heads,
            G=heads // kv_heads,
            D=dim,
            BG=max(16, triton.next_power_of_2(heads // kv_heads)),
            BD=block_d,
            BN=64 if query.dtype != torch.float32 else 16,
            SPLITS=SPLITS,
            num_warps=4,
        )
        attention_combine_kernel[(batch * heads,)](
            partial, lse, out, D=dim, BD=block_d, SPLITS=SPLITS, BS=triton.next_power_of_2(SPLITS), num_warps=4
        )
    return out

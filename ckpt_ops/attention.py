"""Attention of decode tokens through a table of rows: request, position -> key/value row.

Shapes depend on the number of requests only, never on how long they are, so a step can be replayed as a CUDA graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lines: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """One token a request, which sees the rows ``table[line, 0]`` to ``table[line, position]``.

    Args:
        query: ``[B, H_q, D]``, last dimension dense; ``D`` at most 256.
        keys, values: pools ``[rows, H_kv, D]``, contiguous, of the query's dtype, the tokens' own rows written;
            ``H_q`` a multiple of ``H_kv``.
        table: int32 ``[lines, capacity]``.
        lines, positions: int64 ``[B]``.
        scale: factor of the scores.

    Returns:
        ``[B, H_q, D]`` in the query's dtype. On a GPU a row's result does not depend on the other rows.
    """
    if query.is_cuda:
        from ckpt_ops import launch_attention

        return launch_attention.decode_attention(query, keys, values, table, lines, positions, scale)
    longest = int(positions.max()) + 1 if len(positions) else 0
    seen = torch.arange(longest) <= positions[:, None]
    rows = table[lines, :longest].long().masked_fill(~seen, 0)
    attended = F.scaled_dot_product_attention(
        query.unsqueeze(2),
        keys[rows].transpose(1, 2),
        values[rows].transpose(1, 2),
        attn_mask=seen[:, None, None, :],
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return attended.squeeze(2)

"""Running requests as a transformers cache, for modes that transformers runs and for callers who keep the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from .batch import path_rows
from .requests import Request
from .runner import ModelRunner


def export_cache(runner: ModelRunner, requests: Sequence[Request], starts: Sequence[int], width: int) -> DynamicCache:
    """A cache with one row a request, as if each had run alone in a padded batch of ``width`` positions.

    Args:
        runner: the model's runner.
        requests: prefilled requests that still own their slots.
        starts: column of each request's first token.
        width: positions of the cache.

    Returns:
        A cache of its own memory; keys and values of the padding are zero and must stay masked.
    """
    cache = DynamicCache(config=runner.model.config)
    device = runner.model.device
    slots = torch.tensor([r.slot for r in requests], device=device)
    for layer, pool in runner.states.conv.items():
        cache.update_conv_state(pool[slots], layer, conv_kernel_size=pool.shape[-1] + 1)
    for layer, pool in runner.states.recurrent.items():
        cache.update_recurrent_state(pool[slots].float(), layer)
    rows = np.full((len(requests), width), -1, dtype=np.int64)
    for i, (request, start) in enumerate(zip(requests, starts, strict=True)):
        numbers = path_rows(request.kv)
        rows[i, start : start + len(numbers)] = numbers
    index = torch.from_numpy(rows).to(device)
    for layer in runner.kv.keys:
        cache.update(_gather(runner.kv.keys[layer], index), _gather(runner.kv.values[layer], index), layer)
    return cache


def _gather(pool: Tensor, rows: Tensor) -> Tensor:
    """``[R, H_kv, width, D]`` from a pool ``[rows, H_kv, D]``; row -1 gives zeros."""
    gathered = pool[rows.clamp_min(0)].masked_fill_((rows < 0)[..., None, None], 0)
    return gathered.transpose(1, 2).contiguous()

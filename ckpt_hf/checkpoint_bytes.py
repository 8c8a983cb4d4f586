"""How many bytes a checkpoint takes, from a model or from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import CheckpointValueError


@dataclass(frozen=True, slots=True)
class CheckpointBytes:
    """Bytes of a checkpoint: ``fixed`` for its states and logits, ``per_token`` for keys and values of its tokens."""

    fixed: int
    per_token: int


def checkpoint_bytes(model: Any, state_dtype: str = "float32") -> CheckpointBytes:
    """What a checkpoint of ``model`` takes.

    Args:
        model: a Qwen3.5 model (dense or MoE, patched or not), or its configuration; of a configuration of a model with
            images, the text part counts.
        state_dtype: as in :class:`CheckpointConfig`.

    Raises:
        CheckpointValueError: ``model`` is neither, or its configuration has no linear-attention layers.
    """
    config = getattr(model, "config", model)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if not kinds or "linear_attention" not in kinds:
        raise CheckpointValueError(
            f"model must be a model or a configuration with linear_attention layers, got {type(model).__name__}"
        )
    dtype = model.dtype if isinstance(model, nn.Module) else (config.dtype or torch.float32)
    item = (getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    recurrent = values * key_dim * value_dim * getattr(torch, state_dtype).itemsize
    conv = (2 * keys * key_dim + values * value_dim) * (config.linear_conv_kernel_dim - 1) * item
    linear = sum(kind == "linear_attention" for kind in kinds)
    return CheckpointBytes(
        fixed=linear * (recurrent + conv) + config.vocab_size * item,
        per_token=(len(kinds) - linear) * 2 * config.num_key_value_heads * config.head_dim * item,
    )

"""GatedDeltaNet and attention layers that run a packed batch when they are handed one.

Each class is its transformers parent until ``cache`` is a :class:`PackedCache`, so unmarked calls, training, compiled
and exported models take the parent's own path.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

import ckpt_ops

from .attention import packed_attention
from .batch import PackedBatch
from .errors import CheckpointRuntimeError
from .pools import KVPools, StatePools

ATTENTION_NAME = "ckpt_hf_packed"


class PackedCache:
    """What the layers of one step see in place of transformers' cache: the batch and the pools that it addresses."""

    def __init__(self, batch: PackedBatch, states: StatePools, kv: KVPools) -> None:
        self.batch = batch
        self.states = states
        self.kv = kv

    def update(
        self, keys: Tensor, values: Tensor, layer: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the step's keys and values ``[1, H_kv, T, D]``; hand this cache on to the attention function."""
        if kwargs is None:
            raise CheckpointRuntimeError("the attention layer did not pass its keyword arguments to the cache")
        self.kv.write(layer, self.batch.attention.write_rows, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        kwargs["packed_cache"] = self
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given explicitly, so no length is added to them."""
        return 0


def packed_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_cache: PackedCache | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query ``[1, H_q, T, D]``, output ``[1, T, H_q, D]``."""
    if packed_cache is None:
        raise CheckpointRuntimeError(f"attention {ATTENTION_NAME!r} only serves packed batches of a patched model")
    scale = module.head_dim**-0.5 if scaling is None else scaling
    output = packed_attention(
        query[0].transpose(0, 1), packed_cache.kv, module.layer_idx, packed_cache.batch.attention, scale
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)


class PackedAttentionMixin:
    """An attention layer that sends packed batches to :func:`packed_attention_forward`."""

    def forward(self, hidden_states: Tensor, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        """As the parent's."""
        if not isinstance(cache, PackedCache):
            if cache is not None:
                kwargs["cache"] = cache
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        # A view of this module with another configuration: it shares all parameters, hooks nothing and lives for one
        # call, so that neither this module nor a concurrent call on it sees the packed attention's name.
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.__dict__["config"] = _packed_config(self.config)  # type: ignore[attr-defined]
        return super(PackedAttentionMixin, view).forward(hidden_states, *args, cache=cache, **kwargs)  # type: ignore[misc]


def _packed_config(config: Any) -> Any:
    packed = copy.copy(config)
    packed.__dict__["_attn_implementation_internal"] = ATTENTION_NAME
    return packed


_Convolution = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]


class PackedGatedDeltaNetMixin:
    """A GatedDeltaNet layer that runs packed batches through ``ckpt_ops``."""

    layer_idx: int

    def forward(self, hidden_states: Tensor, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        """As the parent's."""
        if isinstance(cache, PackedCache):
            return self._packed_forward(hidden_states, cache)
        if cache is not None:
            kwargs["cache"] = cache
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def _packed_forward(self: Any, hidden_states: Tensor, cache: PackedCache) -> Tensor:
        tokens, at = hidden_states.shape[1], cache.batch.prefill_tokens
        projected = (self.in_proj_qkv(hidden_states), self.in_proj_a(hidden_states), self.in_proj_b(hidden_states))
        outputs = []
        if cache.batch.table is not None:
            outputs.append(self._prefill([x[0, :at] for x in projected], cache))
        if cache.batch.slots is not None:
            outputs.append(self._decode([x[0, at:] for x in projected], cache))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        normed = self.norm(output.reshape(-1, self.head_v_dim), gate)
        return self.out_proj(normed.reshape(1, tokens, -1))

    def _prefill(self: Any, projected: list[Tensor], cache: PackedCache) -> Tensor:
        """Prefill columns, in chunks."""
        pools, table = cache.states, cache.batch.table
        assert table is not None
        conv: _Convolution = self._convolution(projected, pools.conv[self.layer_idx])
        mixed, g, beta = ckpt_ops.conv_gates_prefill(*conv, table, activation="silu")
        query, key, value = self._heads(mixed)
        states = pools.recurrent[self.layer_idx]
        return ckpt_ops.two_phase_gdn_prefill(query, key, value, g, beta, states, table)

    def _decode(self: Any, projected: list[Tensor], cache: PackedCache) -> Tensor:
        """Decode columns, token by token whatever runs beside them."""
        pools, slots = cache.states, cache.batch.slots
        assert slots is not None
        conv: _Convolution = self._convolution(projected, pools.conv[self.layer_idx])
        mixed, g, beta = ckpt_ops.conv_gates_decode(*conv, slots, activation="silu")
        query, key, value = self._heads(mixed)
        return ckpt_ops.gdn_decode(query, key, value, g, beta, pools.recurrent[self.layer_idx], slots)

    def _convolution(self: Any, projected: list[Tensor], states: Tensor) -> _Convolution:
        mixed, a, b = projected
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        return mixed, weight, bias, a, b, self.A_log, self.dt_bias, states

    def _heads(self: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        keys_shape = (-1, self.num_k_heads, self.head_k_dim)
        return query.view(keys_shape), key.view(keys_shape), value.view(-1, self.num_v_heads, self.head_v_dim)

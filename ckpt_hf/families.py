"""The model families that can be patched, and where their layers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

from .errors import CheckpointValueError
from .layers import PackedAttentionMixin, PackedGatedDeltaNetMixin
from .pools import LayerShapes


class PackedQwen3_5GatedDeltaNet(PackedGatedDeltaNetMixin, dense.Qwen3_5GatedDeltaNet):
    """Qwen3.5's GatedDeltaNet."""


class PackedQwen3_5Attention(PackedAttentionMixin, dense.Qwen3_5Attention):
    """Qwen3.5's attention."""


class PackedQwen3_5MoeGatedDeltaNet(PackedGatedDeltaNetMixin, moe.Qwen3_5MoeGatedDeltaNet):
    """Qwen3.5-MoE's GatedDeltaNet."""


class PackedQwen3_5MoeAttention(PackedAttentionMixin, moe.Qwen3_5MoeAttention):
    """Qwen3.5-MoE's attention."""


PACKED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    packed.__mro__[2]: packed
    for packed in (
        PackedQwen3_5GatedDeltaNet,
        PackedQwen3_5Attention,
        PackedQwen3_5MoeGatedDeltaNet,
        PackedQwen3_5MoeAttention,
    )
}
"""transformers' layer class to the class that also runs packed batches."""

SUPPORTED_MODELS: tuple[type[nn.Module], ...] = (dense.Qwen3_5ForCausalLM, moe.Qwen3_5MoeForCausalLM)


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layers of one model that hold state, by layer index."""

    gdn: dict[int, Any]
    attention: dict[int, Any]

    def shapes(self) -> LayerShapes:
        """Row shapes of the model's pools."""
        return LayerShapes(
            recurrent={i: (m.num_v_heads, m.head_k_dim, m.head_v_dim) for i, m in self.gdn.items()},
            conv={i: (m.conv_dim, m.conv_kernel_size - 1) for i, m in self.gdn.items()},
            kv={i: (m.config.num_key_value_heads, m.head_dim) for i, m in self.attention.items()},
        )


def find_layers(model: nn.Module) -> ModelLayers:
    """The stateful layers of ``model``.

    Raises:
        CheckpointValueError: the model is of no supported class or has no GatedDeltaNet layer.
    """
    if not isinstance(model, SUPPORTED_MODELS):
        names = ", ".join(cls.__name__ for cls in SUPPORTED_MODELS)
        raise CheckpointValueError(f"model is a {type(model).__name__}; supported are {names}")
    bases = tuple(PACKED_CLASSES)
    stateful: list[Any] = [m for m in model.modules() if isinstance(m, bases)]
    for layer in stateful:
        if type(layer) not in (*PACKED_CLASSES, *PACKED_CLASSES.values()):
            raise CheckpointValueError(
                f"model has a layer of class {type(layer).__name__}, whose changes to its parent a patch would lose"
            )
    gdn = {m.layer_idx: m for m in stateful if hasattr(m, "A_log")}
    attention = {m.layer_idx: m for m in stateful if not hasattr(m, "A_log")}
    if not gdn:
        raise CheckpointValueError("model has no GatedDeltaNet (linear_attention) layer, so it has no state to save")
    for layer in gdn.values():
        if layer.activation != "silu":
            raise CheckpointValueError(f"model's hidden_act is {layer.activation!r}; only 'silu' is supported")
    return ModelLayers(gdn, attention)

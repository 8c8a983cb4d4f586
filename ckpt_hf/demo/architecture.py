"""The embedded model: Qwen3.5's architecture, two rounds of three Gated DeltaNet layers and one attention layer."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from ckpt_hf.demo.tokenizer import MAX_POSITIONS

_TIME_STEP = (1e-3, 1e-1)
_DECAY = (1.0, 16.0)


def make_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, rounds: int = 2) -> Qwen3_5TextConfig:
    """Configuration for ``4 * rounds`` layers with two value heads to each key head.

    ``pad_token_id`` stays None: a config that names it zeroes that embedding, which would hide a pad that leaks.
    """
    return Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4 * rounds,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * rounds,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.04,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        eos_token_id=tokenizer.eos_token_id,
    )


def make_model(config: Qwen3_5TextConfig) -> Qwen3_5ForCausalLM:
    """A model with random weights in float32, drawn from torch's global generator.

    The gates start as in the paper (arXiv 2412.06464, after Mamba2): rates in [1, 16] and time steps log-uniform in
    [1e-3, 1e-1]. transformers' own initial gates forget a token within the next one.
    """
    model = Qwen3_5ForCausalLM(config)
    low, high = (math.log(step) for step in _TIME_STEP)
    with torch.no_grad():
        for layer, kind in zip(model.model.layers, config.layer_types or (), strict=True):
            if kind == "linear_attention":
                gates = layer.linear_attn
                gates.A_log.uniform_(*_DECAY).log_()
                step = torch.empty_like(gates.dt_bias).uniform_(low, high).exp_()
                gates.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
    return model

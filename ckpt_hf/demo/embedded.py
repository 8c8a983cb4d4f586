"""Where the shipped model and its tokenizer are, and how to load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from ckpt_hf.errors import CheckpointRuntimeError

MODEL_DIRECTORY = Path(__file__).parent / "model"


def load_model(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Qwen3_5ForCausalLM, PreTrainedTokenizerFast]:
    """The shipped model in evaluation mode, and its tokenizer, from the package's own files.

    Raises:
        CheckpointRuntimeError: the installation lacks the weights.
    """
    _require("model.safetensors")
    model = Qwen3_5ForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=dtype, local_files_only=True)
    torch.nn.Module.to(model, device)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(MODEL_DIRECTORY, local_files_only=True)


def training_report() -> dict[str, Any]:
    """What the training run wrote beside the weights: held-out accuracy, arguments, versions.

    Raises:
        CheckpointRuntimeError: the installation lacks the report.
    """
    return json.loads(_require("training.json").read_text())


def _require(name: str) -> Path:
    path = MODEL_DIRECTORY / name
    if not path.is_file():
        raise CheckpointRuntimeError(
            f"the embedded model's file {path} is missing; reinstall the package, or train the model with "
            f"`python -m ckpt_hf.demo.train --out {MODEL_DIRECTORY}`"
        )
    return path

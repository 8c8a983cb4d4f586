"""What a caller can get wrong: the project's error types, a message that names the argument, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt_hf
from ckpt_hf import CheckpointConfig, CheckpointError, CheckpointRuntimeError, CheckpointValueError

from .models import (
    VOCAB,
    alone,
    assert_no_leaks,
    build_model,
    generate,
    new_tokens,
    patched_model,
    plain_model,
    shared_prompts,
)
from .models import random_ids as random_row
from .tokenizers import build_bpe

ROW = random_row(20, 1)
IDS = torch.tensor([ROW])


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with patched_model() as patched:
        yield patched


WRONG_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "position beyond the prompt": ("checkpoint_positions", {"checkpoint_positions": [[21]]}),
    "negative position": ("checkpoint_positions", {"checkpoint_positions": [[-2]]}),
    "float position": ("checkpoint_positions", {"checkpoint_positions": [[1.5]]}),
    "bool position": ("checkpoint_positions", {"checkpoint_positions": [[True]]}),
    "text position": ("checkpoint_positions", {"checkpoint_positions": "12"}),
    "one position": ("checkpoint_positions", {"checkpoint_positions": 12}),
    "rows of positions": ("checkpoint_positions", {"checkpoint_positions": [[1], [2]]}),
    "float tensor": ("checkpoint_positions", {"checkpoint_positions": torch.tensor([[1.0]])}),
    "3-D tensor": ("checkpoint_positions", {"checkpoint_positions": torch.ones(1, 1, 1, dtype=torch.long)}),
    "position_ids": ("position_ids", {"position_ids": torch.arange(20)[None], "checkpoint_positions": [[5]]}),
    "3-row position_ids": (
        "position_ids",
        {"position_ids": torch.arange(20).expand(3, 1, 20), "checkpoint_positions": [[5]]},
    ),
    "inputs_embeds": ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 20, 64), "checkpoint_positions": [[5]]}),
    "salt": ("checkpoint_salt", {"checkpoint_salt": b"x", "checkpoint_positions": [[5]]}),
    "no salt": ("checkpoint_salt", {"checkpoint_salt": None, "checkpoint_positions": [[5]]}),
    "mask of another shape": ("attention_mask", {"attention_mask": torch.ones(1, 19), "checkpoint_positions": [[5]]}),
    "mask of other values": (
        "attention_mask",
        {"attention_mask": torch.full((1, 20), 2), "checkpoint_positions": [[5]]},
    ),
    "mask of zeros": ("input_ids", {"attention_mask": torch.zeros(1, 20).long(), "checkpoint_positions": [[5]]}),
    "id outside the vocabulary": (
        "input_ids",
        {"inputs": torch.tensor([[*ROW[:19], VOCAB]]), "checkpoint_positions": [[5]]},
    ),
    "negative id": ("input_ids", {"inputs": torch.tensor([[*ROW[:19], -1]]), "checkpoint_positions": [[5]]}),
    "longer than the model": ("max_position_embeddings", {"inputs": IDS.repeat(1, 26), "checkpoint_positions": [[5]]}),
    "no columns": ("input_ids", {"inputs": IDS[:, :0], "checkpoint_positions": [[5]]}),
    "no rows": ("input_ids", {"inputs": IDS[:0], "checkpoint_positions": []}),
    "one-dimensional ids": ("input_ids", {"inputs": IDS[0], "checkpoint_positions": [[5]]}),
    "float ids": ("input_ids", {"inputs": IDS.float(), "checkpoint_positions": [[5]]}),
    "list of ids": ("input_ids", {"inputs": [ROW], "checkpoint_positions": [[5]]}),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_arguments_of_generate(model: Any, case: str) -> None:
    name, arguments = WRONG_CALLS[case]
    call = {"inputs": IDS, "max_new_tokens": 2, "do_sample": False} | arguments
    with pytest.raises(CheckpointValueError, match=name):
        model.generate(**call)
    assert_no_leaks(model)
    rows = shared_prompts(10, (2, 3))
    assert new_tokens(generate(model, rows, checkpoint_positions=[[10]] * 2), rows) == alone(plain_model(), rows)


def test_embeddings_without_ids_are_named(model: Any) -> None:
    with pytest.raises(CheckpointValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=torch.zeros(1, 20, 64), checkpoint_positions=[[5]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_new_tokens": 0}, ValueError),
        ({"max_new_tokens": None, "max_length": 5}, ValueError),
        ({"temperature": -1.0, "do_sample": True}, ValueError),
        ({"no_such_argument": 1}, ValueError),
        ({"stop_strings": ["x"]}, ValueError),
        ({"num_return_sequences": 2}, ValueError),
        ({"input_ids": IDS}, ValueError),
    ],
    ids=str,
)
def test_what_transformers_refuses_is_refused_alike(model: Any, arguments: dict[str, Any], error: type) -> None:
    call = {"inputs": IDS, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0} | arguments
    with pytest.raises(error) as stock:
        plain_model().generate(**call)
    with pytest.raises(error) as ours:
        model.generate(**call, checkpoint_positions=[[5]])
    assert type(ours.value) is type(stock.value)
    assert str(ours.value) == str(stock.value)
    assert_no_leaks(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_bytes", -1),
        ("cache_bytes", 1.5),
        ("cache_bytes", True),
        ("cache_slots", -1),
        ("cache_slots", "2"),
        ("max_batch_tokens", 0),
        ("max_batch_tokens", None),
        ("max_batch_tokens", True),
        ("state_dtype", "float64"),
        ("state_dtype", torch.float32),
        ("verify", "yes"),
    ],
)
def test_wrong_settings(name: str, value: Any) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(CheckpointValueError, match=name):
        CheckpointConfig(**settings)


@pytest.mark.parametrize("config", [{}, "float32", CheckpointConfig])
def test_wrong_config(config: Any) -> None:
    model = build_model()
    with pytest.raises(CheckpointValueError, match="config"):
        ckpt_hf.patch(model, config=config)
    assert "generate" not in model.__dict__


def test_another_model_class() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    for model in (LlamaForCausalLM(config), build_model().model, torch.nn.Linear(2, 2), None, "model"):
        with pytest.raises(CheckpointValueError, match="model"):
            ckpt_hf.patch(model)  # type: ignore[type-var]


def test_tokenizer_of_another_model() -> None:
    model, tokenizer = build_model(), build_bpe()
    before = len(tokenizer)
    with pytest.raises(CheckpointValueError, match="tokenizer"):
        ckpt_hf.patch(model, tokenizer)
    for wrong in ("gpt2", object()):
        with pytest.raises(CheckpointValueError, match="tokenizer"):
            ckpt_hf.patch(model, wrong)
    assert len(tokenizer) == before
    assert "generate" not in model.__dict__
    assert type(model.model.layers[0].linear_attn).__module__.startswith("transformers.")


def test_model_without_weights_or_on_several_devices() -> None:
    with pytest.raises(CheckpointRuntimeError, match="meta"):
        ckpt_hf.patch(build_model().to("meta"))
    offloaded = build_model()
    offloaded.hf_device_map = {"model.embed_tokens": "cpu", "model.layers": "disk"}
    with pytest.raises(CheckpointRuntimeError, match="disk"):
        ckpt_hf.patch(offloaded)
    split = build_model()
    split.lm_head.to("meta")
    with pytest.raises(CheckpointRuntimeError, match="split"):
        ckpt_hf.patch(split)


def test_use_without_patch() -> None:
    for function in (ckpt_hf.unpatch, ckpt_hf.stats, ckpt_hf.reset_stats, ckpt_hf.clear):
        with pytest.raises(CheckpointRuntimeError, match="not patched"):
            function(plain_model())


def test_a_model_that_does_not_compute_the_same_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model()
    layer = model.model.layers[0].linear_attn
    layer.forward = type(layer).forward.__get__(layer)  # somebody else's patch: ours is never reached
    with pytest.raises(CheckpointError):
        ckpt_hf.patch(model)
    assert "generate" not in model.__dict__
    assert type(layer).__module__.startswith("transformers.")


@pytest.mark.parametrize("arguments", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": True}], ids=str)
def test_assisted_decoding_is_refused_as_in_transformers(model: Any, arguments: dict[str, Any]) -> None:
    arguments = {name: plain_model() if value is True else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match="stateful") as stock:
        generate(plain_model(), [ROW], **arguments)
    with pytest.raises(ValueError, match="stateful") as ours, pytest.warns(ckpt_hf.CheckpointWarning):
        generate(model, [ROW], checkpoint_positions=[[5]], **arguments)
    assert str(ours.value) == str(stock.value)

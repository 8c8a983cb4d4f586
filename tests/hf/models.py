"""Tiny random models that really remember, and helpers that compare a patched model with a plain one.

With transformers' own initial weights a tiny model hardly has a memory: zeroing its recurrent state moves the logits by
0.01, less than many a fault. Wide weights and slow decay make the same fault move them by more than 1
(``test_invariants.py`` checks it). The configs have no pad token, which would zero an embedding and hide leaking pads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

import ckpt_hf
from ckpt_hf.runner import runner_of

VOCAB = 199
PAD = 0
KINDS = ("dense-1", "dense-2", "dense-4", "moe-2")
"""Family and number of value heads a key head."""

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build_model(kind: str = "dense-2", vocab_size: int = VOCAB, seed: int = 0) -> Any:
    """A fresh fp32 model in evaluation mode."""
    family, ratio = kind.split("-")
    sizes = _COMMON | {
        "vocab_size": vocab_size,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4 // int(ratio),
    }
    torch.manual_seed(seed)
    model: Any
    if family == "dense":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(intermediate_size=96, **sizes))
    else:
        experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(shared_expert_intermediate_size=32, **experts, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.002, 0.1).log())
    return model.eval()


@functools.cache
def plain_model(kind: str = "dense-2", vocab_size: int = VOCAB) -> Any:
    """The unpatched model to compare with; a test must not change it."""
    return build_model(kind, vocab_size)


@contextlib.contextmanager
def patched_model(
    kind: str = "dense-2", tokenizer: Any = None, vocab_size: int = VOCAB, **settings: Any
) -> Iterator[Any]:
    """A patched model with the weights of :func:`plain_model`, and a check at the end that nothing leaked."""
    model = build_model(kind, vocab_size)
    ckpt_hf.patch(model, tokenizer, ckpt_hf.CheckpointConfig(**settings))
    yield model
    assert_no_leaks(model)


@contextlib.contextmanager
def serving(model: Any) -> Iterator[ckpt_hf.Engine]:
    """An engine on a patched model that nothing is left of, and a check at the end that nothing leaked."""
    ckpt_hf.clear(model)
    ckpt_hf.reset_stats(model)
    with ckpt_hf.Engine(model) as running:
        yield running
    assert_no_leaks(model)


def assert_no_leaks(model: Any) -> None:
    """No request is left, and every slot and key/value row belongs to a checkpoint that is ready, or is free."""
    runner = runner_of(model)
    if not runner.started:
        return
    checkpoints = runner.index.checkpoints
    assert not runner.scheduler.requests
    assert not runner.index.demand
    assert [(c.status.value, c.leases) for c in checkpoints] == [("ready", 0)] * len(checkpoints)
    runner.slots.check_integrity([c.key for c in checkpoints])
    runner.kv_rows.check_integrity()
    live = {segment for c in checkpoints if c.kv is not None for segment in c.kv.path()}
    assert runner.kv_rows.segments == live
    assert runner.kv_rows.used == sum(map(len, live))
    assert runner.slots.high_water <= runner.states.num_slots or not runner.slots.used
    assert runner.kv_rows.high_water <= runner.kv.num_rows or not runner.kv_rows.used


def random_ids(length: int, seed: int, vocab_size: int = VOCAB) -> list[int]:
    """Token ids without the pad's id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


def shared_prompts(prefix: int, suffixes: Sequence[int], seed: int = 1) -> list[list[int]]:
    """Prompts with one random prefix and different random suffixes."""
    anchor = random_ids(prefix, seed)
    return [anchor + random_ids(length, 1000 * seed + row) for row, length in enumerate(suffixes)]


def place_markers(marker: int, row: list[int], *at: int) -> list[int]:
    """``row`` with markers before the tokens ``at``; a place given twice gets two."""
    return [token for i, t in enumerate([*row, None]) for token in [marker] * at.count(i) + [t] if token is not None]


def padded(rows: Sequence[Sequence[int]], side: str = "left") -> tuple[Tensor, Tensor]:
    """Ids and mask ``[B, L]`` of ragged rows."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill, ones = [PAD] * (width - len(row)), [1] * len(row)
        zeros = [0] * len(fill)
        ids.append([*fill, *row] if side == "left" else [*row, *fill])
        mask.append([*zeros, *ones] if side == "left" else [*ones, *zeros])
    return torch.tensor(ids), torch.tensor(mask)


def generate(model: Any, rows: Sequence[Sequence[int]], *, side: str = "left", **kwargs: Any) -> Any:
    """``model.generate`` for ragged rows, greedy and 6 tokens long unless told otherwise."""
    ids, mask = padded(rows, side)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD} | kwargs
    return model.generate(ids, attention_mask=mask, **settings)


def new_tokens(result: Any, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """What was generated behind the padded prompts."""
    sequences = result if isinstance(result, Tensor) else result.sequences
    return sequences[:, max(map(len, rows)) :].tolist()


def alone(model: Any, rows: Sequence[Sequence[int]], **kwargs: Any) -> list[list[int]]:
    """What an unpatched model generates for each row by itself."""
    return [new_tokens(generate(model, [row], **kwargs), [row])[0] for row in rows]


class TokenSpy:
    """Records every call of a model's embedding: the ids that reach the model."""

    def __init__(self, model: Any) -> None:
        self.calls: list[list[list[int]]] = []
        embedding: nn.Module = model.get_input_embeddings()
        self._handle = embedding.register_forward_pre_hook(lambda _, args: self.calls.append(args[0].tolist()))

    def __enter__(self) -> TokenSpy:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    @property
    def ids(self) -> list[int]:
        """All ids in order."""
        return [token for call in self.calls for row in call for token in row]

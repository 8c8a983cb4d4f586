"""The patched model on a GPU: Triton kernels and variable-length attention against transformers' own path."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import ckpt_hf

pytestmark = pytest.mark.gpu
PREFIX, TAILS, NEW = 130, (5, 64, 1, 65, 127), 12


@pytest.fixture(scope="module")
def reference_model() -> Any:
    """A random model that remembers: slow decay and large weights, in fp32 on the CPU."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=128,
        initializer_range=0.05,
        eos_token_id=None,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.log(torch.empty_like(parameter).uniform_(0.002, 0.1)))
    return model


def make_batch() -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    generator = torch.Generator().manual_seed(3)
    anchor = torch.randint(1, 511, (PREFIX,), generator=generator).tolist()
    rows = [anchor + torch.randint(1, 511, (n,), generator=generator).tolist() for n in TAILS]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask, [[PREFIX]] * len(rows)


def run(model: Any, device: str, **options: Any) -> Any:
    ids, mask, _ = make_batch()
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    return model.generate(ids.to(device), attention_mask=mask.to(device), output_logits=True, **settings, **options)


def first_logits_error(actual: Any, expected: Any) -> float:
    a, b = actual.logits[0].double().cpu(), expected.logits[0].double().cpu()
    return ((a - b).norm() / b.norm()).item()


def test_float32_answers_are_those_of_transformers(reference_model: Any) -> None:
    expected = run(reference_model, "cpu")
    model = ckpt_hf.patch(copy.deepcopy(reference_model).cuda())
    _, _, positions = make_batch()
    for _ in range(2):
        actual = run(model, "cuda", checkpoint_positions=positions)
        # fp32 sums of a few hundred terms in another order, over four layers.
        assert first_logits_error(actual, expected) <= 1e-4
        assert torch.equal(actual.sequences.cpu(), expected.sequences)
    assert ckpt_hf.stats(model).computed_tokens == PREFIX + 2 * sum(TAILS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_less_accurate_than_transformers(reference_model: Any, dtype: torch.dtype) -> None:
    exact = run(reference_model, "cpu")
    half = copy.deepcopy(reference_model).to("cuda", dtype)
    plain_error = first_logits_error(run(half, "cuda"), exact)
    model = ckpt_hf.patch(half)
    _, _, positions = make_batch()
    cold = run(model, "cuda", checkpoint_positions=positions)
    warm = run(model, "cuda", checkpoint_positions=positions)
    # The same number of roundings in another order: the errors differ by chance, not by a factor.
    assert first_logits_error(cold, exact) <= 2 * plain_error
    assert first_logits_error(warm, exact) <= 2 * plain_error


def test_handed_over_beams_start_from_the_checkpoint(reference_model: Any) -> None:
    model = copy.deepcopy(reference_model).cuda()
    generator = torch.Generator().manual_seed(5)
    anchor = torch.randint(1, 511, (1, PREFIX), generator=generator).expand(2, -1)
    ids = torch.cat([anchor, torch.randint(1, 511, (2, 9), generator=generator)], dim=1).cuda()
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    ckpt_hf.patch(model)
    actual = model.generate(ids, checkpoint_positions=[[PREFIX]] * 2, **options)
    assert torch.equal(actual, expected)
    assert ckpt_hf.stats(model).computed_tokens == PREFIX

"""``patch`` changes one instance, in place, reversibly; unmarked calls and training stay transformers' own."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, Qwen3_5ForCausalLM, StaticCache

import ckpt_hf
from ckpt_hf import CheckpointConfig, CheckpointRuntimeError

from .models import (
    KINDS,
    TokenSpy,
    alone,
    assert_no_leaks,
    build_model,
    generate,
    new_tokens,
    padded,
    patched_model,
    plain_model,
    random_ids,
    shared_prompts,
)

ROWS = shared_prompts(40, (5, 9))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def logits(model: Any, rows: list[list[int]] = ROWS) -> torch.Tensor:
    result = generate(model, rows, max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    return torch.stack(result.logits)


def checkpointed(model: Any) -> list[list[int]]:
    return new_tokens(generate(model, ROWS, checkpoint_positions=[[40]] * 2), ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_unmarked_calls_are_bitwise_equal_and_unpatch_restores(kind: str) -> None:
    model = build_model(kind)
    before, types, state = logits(model), classes(model), dict(vars(model))
    assert ckpt_hf.patch(model) is model
    assert torch.equal(logits(model), before)
    checkpointed(model)
    assert torch.equal(logits(model), before)
    assert ckpt_hf.unpatch(model) is model
    assert torch.equal(logits(model), before)
    assert classes(model) == types
    assert dict(vars(model)) == state
    with pytest.raises((ValueError, TypeError)):
        checkpointed(model)
    ckpt_hf.patch(model)
    assert checkpointed(model) == alone(plain_model(kind), ROWS)


def test_patching_twice_is_refused() -> None:
    with patched_model() as model:
        with pytest.raises(CheckpointRuntimeError, match="already patched"):
            ckpt_hf.patch(model)
        assert checkpointed(model) == alone(plain_model(), ROWS)
        ckpt_hf.unpatch(model)
        with pytest.raises(CheckpointRuntimeError, match="not patched"):
            ckpt_hf.unpatch(model)
        ckpt_hf.patch(model)


def test_other_instances_are_not_touched() -> None:
    other = build_model()
    with patched_model():
        assert "generate" not in vars(other)
        assert all(cls.__module__.split(".")[0] != "ckpt_hf" for cls in classes(other))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_patched_and_independent(way: str) -> None:
    with patched_model() as model:
        checkpointed(model)
        twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            twin.lm_head.weight.neg_()
        flipped = build_model()
        with torch.no_grad():
            flipped.lm_head.weight.neg_()
        assert ckpt_hf.stats(twin).checkpoints == 0
        assert checkpointed(twin) == alone(flipped, ROWS)
        assert ckpt_hf.stats(twin).computed_tokens == 40 + 5 + 9
        with TokenSpy(model) as spy:
            assert checkpointed(model) == alone(plain_model(), ROWS)
        assert len(spy.ids) == 5 + 9 + 2 * 5
        ckpt_hf.unpatch(twin)
        assert_no_leaks(model)


def test_saving_leaves_no_trace(tmp_path: Path) -> None:
    with patched_model() as model:
        checkpointed(model)
        assert model.state_dict().keys() == plain_model().state_dict().keys()
        model.save_pretrained(tmp_path / "patched")
    plain_model().save_pretrained(tmp_path / "plain")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "patched" / name).read_text() == (tmp_path / "plain" / name).read_text()
    again = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "patched").eval()
    assert classes(again) == classes(plain_model())
    assert torch.equal(logits(again), logits(plain_model()))


def test_accelerate_hooks_survive() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(build_model(), device_map={"": "cpu"}, force_hooks=True)
    layer = model.model.layers[0].linear_attn
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook("cpu"), append=True)
    hook = layer._hf_hook
    ckpt_hf.patch(model)
    assert layer._hf_hook is hook
    assert checkpointed(model) == alone(plain_model(), ROWS)
    assert_no_leaks(model)
    ckpt_hf.unpatch(model)
    assert layer._hf_hook is hook
    assert torch.equal(logits(model), logits(plain_model()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_half_precision_stays_close(dtype: torch.dtype, state_dtype: str) -> None:
    rows = shared_prompts(100, (7, 30))
    plain, model = build_model().to(dtype), build_model().to(dtype)
    ckpt_hf.patch(model, config=CheckpointConfig(state_dtype=state_dtype))
    settings: dict[str, Any] = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    expected = generate(plain_model(), rows, **settings).logits[0]
    stock = (generate(plain, rows, **settings).logits[0] - expected).norm()
    for _ in range(2):
        ours = generate(model, rows, checkpoint_positions=[[100]] * 2, **settings).logits[0] - expected
        assert ours.isfinite().all()
        # Another order of the same roundings: of the size of the stock model's own error, and far from a lost state.
        assert ours.norm() < 2 * stock + 1e-3, (ours.norm(), stock)
    assert_no_leaks(model)


def test_dtype_and_precision_may_change_after_patching() -> None:
    with patched_model() as model:
        checkpointed(model)
        model.double()
        assert checkpointed(model) == alone(build_model().double(), ROWS)
        assert_no_leaks(model)


def test_generate_from_four_threads() -> None:
    expected, failures = alone(plain_model(), ROWS), []
    with patched_model(max_batch_tokens=64) as model:

        def work(marked: bool) -> None:
            for _ in range(3):
                result = checkpointed(model) if marked else new_tokens(generate(model, ROWS), ROWS)
                if result != expected:
                    failures.append((marked, result))

        threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.parametrize("kind", ["dense-2", "moe-2"])
def test_a_training_step_is_the_unpatched_model_s(kind: str) -> None:
    ids, mask = padded(ROWS)
    grads = []
    for patched in (False, True):
        model = build_model(kind)
        if patched:
            ckpt_hf.patch(model)
            checkpointed(model)
        model.train()
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(grads[0]) == len(grads[1]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_unmarked_static_cache_and_compile_are_not_broken() -> None:
    row = [random_ids(12, 3)]
    expected = generate(plain_model(), row, cache_implementation="static", disable_compile=True)
    with patched_model() as model:
        assert torch.equal(generate(model, row, cache_implementation="static", disable_compile=True), expected)
        assert model.config._attn_implementation == plain_model().config._attn_implementation
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            result = compiled(input_ids=torch.tensor(row), cache=cache).logits
            plain = plain_model()(torch.tensor(row)).logits
        assert (result - plain).abs().max() < 1e-4


def test_nothing_of_the_caller_s_is_changed() -> None:
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, eos_token_id=[60], do_sample=False)
    positions = [[40], [40, 41]]
    ids, mask = padded(ROWS)
    kwargs = {"attention_mask": mask, "checkpoint_positions": positions, "generation_config": config}
    before = ids.clone(), mask.clone(), copy.deepcopy(positions), config.to_dict()
    with patched_model() as model:
        settings = model.generation_config.to_dict(), model.config.to_dict()
        model.generate(ids, **kwargs)
        assert (model.generation_config.to_dict(), model.config.to_dict()) == settings
    assert torch.equal(ids, before[0])
    assert torch.equal(mask, before[1])
    assert (positions, config.to_dict()) == before[2:]
    assert kwargs.keys() == {"attention_mask", "checkpoint_positions", "generation_config"}

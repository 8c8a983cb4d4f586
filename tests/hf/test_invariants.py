"""The promises of the design, observed from outside: what reaches the model, how often, and what stays behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import ckpt_hf
from ckpt_hf.runner import runner_of

from .models import (
    KINDS,
    TokenSpy,
    alone,
    assert_no_leaks,
    build_model,
    generate,
    new_tokens,
    patched_model,
    plain_model,
    random_ids,
    shared_prompts,
)

LOGIT_TOLERANCE = 1e-4  # absolute, fp32, logits of order 10


class Refusal(Exception):
    """Raised by the tests' own hooks."""


def marked_logits(model: Any, rows: list[list[int]], boundary: int, **kwargs: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 3}
    positions: dict[str, Any] = {} if boundary < 0 else {"checkpoint_positions": [[boundary]] * len(rows)}
    return torch.stack(generate(model, rows, **settings, **positions, **kwargs).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_of_these_tests_remember(kind: str) -> None:
    model = plain_model(kind)
    ids = torch.tensor([random_ids(65, 2)])
    cache = model(ids[:, :64], use_cache=True).cache
    forgetful = model(ids[:, :64], use_cache=True).cache
    for layer in forgetful.layers:
        for name, state in vars(layer).items():
            if "recurrent" in name and isinstance(state, torch.Tensor):
                state.zero_()
            elif "recurrent" in name and isinstance(state, dict):
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor):
                        tensor.zero_()
    with torch.no_grad():
        moved = model(ids[:, 64:], cache=cache).logits - model(ids[:, 64:], cache=forgetful).logits
    assert moved.abs().max() > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [{}, {"max_batch_tokens": 64}], ids=str)
def test_logits_are_those_of_the_unpatched_model(kind: str, limits: dict[str, Any]) -> None:
    rows = shared_prompts(130, (5, 70, 1))
    expected = marked_logits(plain_model(kind), rows, -1)
    with patched_model(kind, **limits) as model:
        cold, warm = (marked_logits(model, rows, 130) for _ in range(2))
    assert (cold - expected).abs().max() < LOGIT_TOLERANCE
    assert (warm - expected).abs().max() < LOGIT_TOLERANCE


def test_a_hit_equals_a_miss_bit_for_bit_at_one_row() -> None:
    (row,) = shared_prompts(100, (7,))
    with patched_model() as model:
        cold, warm, again = (marked_logits(model, [row], 100) for _ in range(3))
    # The matrix products of a 7-token forward round differently from those of a 107-token one.
    assert (cold - warm).abs().max() < LOGIT_TOLERANCE
    assert torch.equal(warm, again)


@pytest.mark.parametrize("tokens", [None, 64])
def test_the_prefix_runs_once_in_any_order_of_arrival(tokens: int | None) -> None:
    rows = shared_prompts(130, (5, 70, 1, 64))
    limits: dict[str, Any] = {} if tokens is None else {"max_batch_tokens": tokens}
    expected = alone(plain_model(), rows)
    for order in itertools.islice(itertools.permutations(range(4)), 0, None, 2):
        with patched_model(verify=False, **limits) as model, TokenSpy(model) as spy:
            shuffled = [rows[i] for i in order]
            result = generate(model, shuffled, checkpoint_positions=[[130]] * 4, max_new_tokens=1)
            assert sorted(spy.ids) == sorted(rows[0][:130] + [t for row in rows for t in row[130:]])
            assert new_tokens(result, rows) == [[expected[i][0]] for i in order]
            spy.calls.clear()
            generate(model, shuffled, checkpoint_positions=[[130]] * 4, max_new_tokens=1)
            assert sorted(spy.ids) == sorted(t for row in rows for t in row[130:])


@pytest.mark.parametrize("tokens", [64, 128, 16384])
def test_the_prefix_runs_once_when_a_row_ends_with_it(tokens: int) -> None:
    rows = shared_prompts(128, (5, 0, 9))
    for order in itertools.permutations(range(3)):
        with patched_model(verify=False, max_batch_tokens=tokens) as model, TokenSpy(model) as spy:
            generate(model, [rows[i] for i in order], checkpoint_positions=[[128]] * 3, max_new_tokens=1)
            assert len(spy.ids) == 128 + 5 + 9, f"order {order}"


def test_beams_start_from_a_checkpoint_of_an_earlier_call() -> None:
    rows = shared_prompts(70, (5, 5))
    with patched_model() as model:
        generate(model, rows, checkpoint_positions=[[70]] * 2)
        with TokenSpy(model) as spy:
            generate(model, rows, checkpoint_positions=[[70]] * 2, num_beams=2, max_new_tokens=1)
        assert len(spy.ids) == 2 * 2 * 5


def test_a_boundary_within_a_kept_prefix_starts_from_the_longest_one() -> None:
    base = random_ids(120, 3)
    with patched_model() as model:
        generate(model, [base], checkpoint_positions=[[40, 80]])
        longer = base[:80] + random_ids(10, 4)
        with TokenSpy(model) as spy:
            generate(model, [longer], checkpoint_positions=[[40, 80]], max_new_tokens=1)
        assert spy.ids == longer[80:]


def test_salts_keep_callers_apart() -> None:
    rows = shared_prompts(30, (4,))
    with patched_model() as model:
        for salt in ("", "a", "b", "\ud800"):
            for expected in (0, 30):
                ckpt_hf.reset_stats(model)
                generate(model, rows, checkpoint_positions=[[30]], checkpoint_salt=salt)
                assert ckpt_hf.stats(model).cached_tokens == expected


@pytest.mark.parametrize("tokens", [64, 100, 16384])
@pytest.mark.parametrize("fails_at", range(4))
def test_a_failed_forward_leaks_nothing_and_the_next_call_works(tokens: int, fails_at: int) -> None:
    rows = shared_prompts(70, (5, 70, 1))
    expected = alone(plain_model(), rows)
    with patched_model(max_batch_tokens=tokens) as model:
        steps = itertools.count()

        def refuse(*_: object) -> None:
            if next(steps) == fails_at:
                raise Refusal

        handle = model.model.layers[2].register_forward_pre_hook(refuse)
        with pytest.raises(Refusal):
            generate(model, rows, checkpoint_positions=[[70]] * 3)
        handle.remove()
        assert_no_leaks(model)
        for _ in range(2):
            assert new_tokens(generate(model, rows, checkpoint_positions=[[70]] * 3), rows) == expected


def test_an_interrupt_while_planning_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = shared_prompts(70, (5, 9))
    with patched_model() as model:
        scheduler = runner_of(model).scheduler
        schedule, calls = type(scheduler)._start, itertools.count()

        def interrupted(self: Any, *args: Any) -> Any:
            if next(calls) == 1:
                raise KeyboardInterrupt
            return schedule(self, *args)

        monkeypatch.setattr(type(scheduler), "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(model, rows, checkpoint_positions=[[70]] * 2)
        monkeypatch.undo()
        assert_no_leaks(model)
        assert new_tokens(generate(model, rows, checkpoint_positions=[[70]] * 2), rows) == alone(plain_model(), rows)


def test_a_criterion_that_raises_leaks_nothing() -> None:
    class Raises(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            raise Refusal

    rows = shared_prompts(70, (5, 9))
    with patched_model() as model:
        for _ in range(2):
            with pytest.raises(Refusal):
                generate(model, rows, checkpoint_positions=[[70]] * 2, stopping_criteria=[Raises()])
            assert_no_leaks(model)
        assert new_tokens(generate(model, rows, checkpoint_positions=[[70]] * 2), rows) == alone(plain_model(), rows)


@pytest.mark.parametrize("first", [True, False])
def test_calls_inside_and_outside_inference_mode_mix(first: bool) -> None:
    rows = shared_prompts(70, (5, 9))
    expected = alone(plain_model(), rows)
    with patched_model() as model:
        for inference in (first, not first, first):
            with torch.inference_mode(inference):
                result = generate(model, rows, checkpoint_positions=[[70]] * 2)
            assert new_tokens(result, rows) == expected


@pytest.mark.parametrize("change", ["in_place", "load_state_dict", "assign", "data_and_clear"])
def test_checkpoints_of_other_weights_are_not_used(change: str) -> None:
    rows = shared_prompts(40, (5,))
    other = build_model(seed=5)
    with patched_model() as model:
        generate(model, rows, checkpoint_positions=[[40]])
        with torch.no_grad():
            for mine, new in zip(model.parameters(), other.parameters(), strict=True):
                if change == "in_place":
                    mine.copy_(new)
                elif change == "assign":
                    mine.data = new.data.clone()
                elif change == "data_and_clear":  # torch does not tell of such writes, so the caller must
                    mine.data.copy_(new)
        if change == "data_and_clear":
            ckpt_hf.clear(model)
        if change == "load_state_dict":
            model.load_state_dict(other.state_dict())
        result = generate(model, rows, checkpoint_positions=[[40]])
        assert new_tokens(result, rows) == alone(other, rows)

"""Conversations: ends of prompts and answers that are kept, markers in every prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_hf
from ckpt_hf import CheckpointRuntimeError, Engine, GenerationOutput
from ckpt_hf.runner import runner_of

from .models import alone, patched_model, place_markers, plain_model, random_ids, serving
from .tokenizers import build_bpe

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
TURNS = [random_ids(length, 60 + length) for length in (40, 9, 70, 1, 25)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with patched_model(max_batch_tokens=256) as patched:
        yield patched


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with serving(model) as running:
        yield running


def converse(engine: Engine, **options: Any) -> list[GenerationOutput]:
    """Five turns, each prompt all that was said before and a new message."""
    said: list[int] = []
    outputs = []
    for message in TURNS:
        said += message
        output = engine.submit(said, **GREEDY, **options).result(60)
        assert output.generated_tokens == alone(plain_model(), [said])[0]
        said = said + output.generated_tokens
        outputs.append(output)
    return outputs


def computed(outputs: list[GenerationOutput]) -> list[int]:
    return [output.usage.computed_tokens for output in outputs if output.usage is not None]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Each turn computes what was said before, or the last answer and the message, or the answer's last token,
        # which was chosen and never computed, and the message.
        ({}, [40, 55, 131, 138, 169]),
        ({"keep_prompt": True}, [40, 15, 76, 7, 31]),
        ({"keep_answer": True}, [40, 10, 71, 2, 26]),
        ({"keep_prompt": True, "keep_answer": True}, [40, 10, 71, 2, 26]),
    ],
)
def test_the_next_turn_starts_where_the_last_one_ended(
    engine: Engine, options: dict[str, bool], expected: list[int]
) -> None:
    assert computed(converse(engine, **options)) == expected


def test_ends_are_kept_at_no_extra_forward(engine: Engine, model: Any) -> None:
    engine.submit(TURNS[0], **GREEDY).result(60)
    plain = ckpt_hf.stats(model)
    engine.submit(TURNS[2], keep_prompt=True, keep_answer=True, **GREEDY).result(60)
    kept = ckpt_hf.stats(model)
    usage = engine.submit(TURNS[1], keep_prompt=True, checkpoint_positions=[4], **GREEDY).result(60).usage
    assert usage is not None
    assert (usage.boundaries, usage.reasons) == ((4,), {4: "never seen"})
    assert kept.prefill_steps - plain.prefill_steps == plain.prefill_steps
    assert kept.decode_steps - plain.decode_steps == plain.decode_steps
    assert (plain.checkpoints, kept.checkpoints) == (0, 2)


def test_the_engine_s_defaults_and_a_regenerated_answer(model: Any) -> None:
    ckpt_hf.clear(model)
    with Engine(model, keep_prompts=True) as engine:
        first = engine.submit(TURNS[0], **GREEDY).result(60)
        again = engine.submit(TURNS[0], do_sample=True, seed=1, max_new_tokens=3).result(60)
        without = engine.submit(TURNS[2], keep_prompt=False, **GREEDY).result(60)
        twice = engine.submit(TURNS[2], keep_prompt=False, **GREEDY).result(60)
    assert computed([first, again, without, twice]) == [40, 0, 70, 70]


def test_other_salts_do_not_see_the_ends(engine: Engine) -> None:
    engine.submit(TURNS[0], keep_prompt=True, salt="a", **GREEDY).result(60)
    outputs = [engine.submit(TURNS[0] + [3], salt=salt, **GREEDY).result(60) for salt in ("b", None, "a")]
    assert computed(outputs) == [41, 41, 1]


def test_declared_checkpoints_outlive_kept_ends() -> None:
    with patched_model(cache_slots=3) as model, Engine(model, keep_prompts=True, keep_answers=True) as engine:
        declared = random_ids(30, 1)
        engine.submit([*declared, 5], checkpoint_positions=[30], **GREEDY).result(60)
        for i in range(6):
            engine.submit(random_ids(20, 10 + i), **GREEDY).result(60)
        output = engine.submit([*declared, 6, 7], checkpoint_positions=[30], **GREEDY).result(60)
        assert computed([output]) == [2]
        assert ckpt_hf.stats(model).checkpoints == 3


def test_a_marker_in_every_prompt_of_a_chat() -> None:
    tokenizer = build_bpe()
    with patched_model("dense-2", tokenizer, 450, max_batch_tokens=128) as model, Engine(model) as engine:
        marker = ckpt_hf.marker_id(tokenizer)
        assert marker is not None
        said: list[int] = []
        places: list[int] = []
        for turn, message in enumerate(TURNS):
            said = said + message
            places.append(len(said))
            marked = [*place_markers(marker, said, *places[:-1]), marker]
            output = engine.submit(marked, **GREEDY).result(60)
            assert output.generated_tokens == alone(plain_model("dense-2", 450), [said])[0]
            assert output.usage is not None
            assert output.usage.boundaries == tuple(places)
            assert output.usage.cached_tokens == (places[-2] if turn else 0)
            said = said + output.generated_tokens


def test_a_producer_slower_than_its_consumers(model: Any, engine: Engine) -> None:
    """The anchor takes two steps, in which those that wait for it hold no slot."""
    owned: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: owned.append(runner_of(model).slots.used))
    anchor = random_ids(300, 5)
    rows = [anchor + random_ids(3 + i, i) for i in range(5)]
    handles = [engine.submit(row, checkpoint_positions=[300], **GREEDY) for row in rows]
    other = engine.submit(TURNS[1], **GREEDY)
    assert [handle.result(60).generated_tokens for handle in handles] == alone(plain_model(), rows)
    assert other.result(60).generated_tokens == alone(plain_model(), [TURNS[1]])[0]
    hook.remove()
    assert owned[0] == 1
    assert sum(computed([handle.output for handle in handles])) == 300 + sum(3 + i for i in range(5))


def test_a_chain_of_three_markers(engine: Engine) -> None:
    base = random_ids(200, 6)
    rows = [base[:150] + random_ids(9, 1), base[:100] + random_ids(9, 2), base[:50] + random_ids(9, 3), base]
    handles = [
        engine.submit(row, checkpoint_positions=[b for b in (50, 100, 150) if b <= len(row)], **GREEDY) for row in rows
    ]
    assert [handle.result(60).generated_tokens for handle in handles] == alone(plain_model(), rows)
    assert sum(computed([handle.output for handle in handles])) == 200 + 9 + 9 + 9


def test_requests_run_within_the_limits() -> None:
    rows = [random_ids(20 + i, i) for i in range(12)]
    expected = alone(plain_model(), rows)
    running: list[int] = []
    with patched_model(max_running=3) as model:
        runner = runner_of(model)
        model.model.layers[0].register_forward_pre_hook(
            lambda *_: running.append(len(runner.scheduler.running)) if runner.started else None
        )
        with Engine(model) as engine:
            handles = [engine.submit(row, **GREEDY) for row in rows]
            assert [handle.result(60).generated_tokens for handle in handles] == expected
    assert max(running) == 3


def test_preempted_requests_give_the_same_answers() -> None:
    rows = [random_ids(20 + i, i) for i in range(6)]
    expected = alone(plain_model(), rows, max_new_tokens=40)
    with patched_model() as probe:
        memory = runner_of(probe).memory
        state, token = memory.states.bytes_per_slot, memory.kv.bytes_per_row
    # Room for the prompts of four and some of their answers.
    with patched_model(memory_bytes=4 * state + 4 * 40 * token) as model, Engine(model) as engine:
        preempted: list[int | None] = []
        engine.events.add(lambda event: preempted.append(event.request) if event.kind == "preempted" else None)
        handles = [engine.submit(row, max_new_tokens=40, do_sample=False) for row in rows]
        assert [handle.result(60).generated_tokens for handle in handles] == expected
        assert preempted
        with pytest.raises(CheckpointRuntimeError, match="bytes of memory"):
            engine.submit(random_ids(500, 1), max_new_tokens=1).result(60)


def test_the_readme_s_example() -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (example,) = re.findall(r"<!-- engine-example -->\n```python\n(.*?)```", text, re.DOTALL)
    tokenizer = build_bpe()
    with patched_model("dense-2", tokenizer, 450) as model:
        names: dict[str, Any] = {"ckpt_hf": ckpt_hf, "model": model, "tokenizer": tokenizer, "prompt": "red shoes"}
        names |= {"prompts": ["blue hats", "red hats"], "system_prompt": "shoes and hats"}
        exec(example, names)
    assert len(names["output"].generated_tokens) == 64
    assert [len(output.generated_tokens) for output in names["outputs"]] == [16, 16]

"""Random scripts of what users do to an engine, run turn by turn in the test's thread, and what must come of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import LogitsProcessor

import ckpt_hf
from ckpt_hf import Engine, Handle, HandleStatus
from ckpt_hf.step_loop import StepLoop

from .models import alone, assert_no_leaks, generate, new_tokens, plain_model, random_ids

NEW_TOKENS = 8
_ANCHORS = [random_ids(length, 40 + length) for length in (1, 64, 90, 150)]
# Two anchors of which one continues the other, so that boundaries nest; suffixes shorter and longer than a chunk.
_ANCHORS.append(_ANCHORS[2] + random_ids(40, 3))
PROMPTS = [anchor + random_ids(tail, 7 * tail + len(anchor)) for anchor in _ANCHORS for tail in (0, 1, 30, 70)]
BOUNDARIES = (1, 20, 64, 90, 130, 150)


@functools.cache
def expected(prompt: int) -> list[int]:
    """What an unpatched model answers to a prompt alone."""
    return alone(plain_model(), [PROMPTS[prompt]], max_new_tokens=NEW_TOKENS)[0]


@dataclass(frozen=True)
class Submit:
    prompt: int
    boundaries: tuple[int, ...]
    new_tokens: int
    priority: int = 0
    salt: str | None = None
    fails_at: int | None = None
    ends_early: bool = False
    keep_prompt: bool = False
    keep_answer: bool = False

    def answer(self) -> list[int]:
        """What an unpatched model answers alone; the third token is an end token where it ``ends_early``."""
        tokens = expected(self.prompt)
        stop = tokens.index(tokens[2]) + 1 if self.ends_early else NEW_TOKENS
        return tokens[: min(stop, self.new_tokens)]


@dataclass(frozen=True)
class Cancel:
    which: int


@dataclass(frozen=True)
class Turns:
    count: int


@dataclass(frozen=True)
class StepFails:
    error: str


@dataclass(frozen=True)
class Clear:
    pass


@dataclass(frozen=True)
class Generate:
    prompts: tuple[int, ...]


Action = Submit | Cancel | Turns | StepFails | Clear | Generate

_PROMPT = st.integers(0, len(PROMPTS) - 1)
_SUBMIT = st.builds(
    Submit,
    prompt=_PROMPT,
    boundaries=st.sets(st.sampled_from(BOUNDARIES), max_size=4).map(lambda chosen: tuple(sorted(chosen))),
    new_tokens=st.integers(1, NEW_TOKENS),
    priority=st.integers(0, 2),
    salt=st.sampled_from([None, None, "a"]),
    fails_at=st.sampled_from([None, None, None, 0, 2]),
    ends_early=st.booleans(),
    keep_prompt=st.booleans(),
    keep_answer=st.booleans(),
)
SCRIPTS = st.lists(
    st.one_of(
        _SUBMIT,
        _SUBMIT,
        _SUBMIT,
        st.builds(Turns, st.integers(1, 6)),
        st.builds(Cancel, st.integers(0, 30)),
        st.builds(StepFails, st.sampled_from(["memory", "code"])),
        st.builds(Clear),
        st.builds(Generate, st.lists(_PROMPT, min_size=1, max_size=3).map(tuple)),
    ),
    min_size=3,
    max_size=25,
)


class _Raises(LogitsProcessor):
    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.left:
            raise ArithmeticError("of the request")
        self.left -= 1
        return scores


class ScriptedEngine:
    """An engine whose thread never starts: the script takes its turns.

    Args:
        model: a patched model.
    """

    def __init__(self, model: Any) -> None:
        start = StepLoop.start
        StepLoop.start = lambda loop: None  # type: ignore[method-assign]
        try:
            self.engine = Engine(model)
        finally:
            StepLoop.start = start  # type: ignore[method-assign]
        self.model = model
        self.loop = self.engine._loop
        self.handles: list[tuple[Submit, Handle, bool]] = []
        self.failing: list[Exception] = []
        self.step_failed = self.memory_failed = False
        self._hook = model.model.layers[1].register_forward_pre_hook(self._fail)

    def run(self, script: list[Action]) -> None:
        """Carry the script out, let everything end, and check every result."""
        steps: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Turns: self._turns,
            StepFails: self._arm,
            Clear: lambda _: ckpt_hf.clear(self.model),
            Generate: self._generate,
        }
        try:
            for action in script:
                steps[type(action)](action)
            self._settle()
            self._check()
        finally:
            self._hook.remove()
            self.loop.end_all(RuntimeError("the script failed"))
            self.engine.close()
        assert_no_leaks(self.model)

    def _submit(self, action: Submit) -> None:
        prompt = PROMPTS[action.prompt]
        handle = self.engine.submit(
            prompt,
            checkpoint_positions=[b for b in action.boundaries if b <= len(prompt)],
            max_new_tokens=action.new_tokens,
            do_sample=False,
            priority=action.priority,
            salt=action.salt,
            eos_token_id=expected(action.prompt)[2] if action.ends_early else None,
            keep_prompt=action.keep_prompt,
            keep_answer=action.keep_answer,
            logits_processor=None if action.fails_at is None else [_Raises(action.fails_at)],
        )
        self.handles.append((action, handle, False))

    def _cancel(self, action: Cancel) -> None:
        if self.handles:
            at = action.which % len(self.handles)
            submitted, handle, cancelled = self.handles[at]
            self.handles[at] = submitted, handle, handle.cancel() or cancelled

    def _turns(self, action: Turns) -> None:
        with torch.no_grad():
            for _ in range(action.count):
                self.loop.take_turn()

    def _arm(self, action: StepFails) -> None:
        self.failing.append(torch.OutOfMemoryError("full") if action.error == "memory" else ArithmeticError("step"))

    def _fail(self, *_: Any) -> None:
        if self.failing:
            error = self.failing.pop()
            self.memory_failed |= isinstance(error, torch.OutOfMemoryError)
            self.step_failed |= not isinstance(error, torch.OutOfMemoryError)
            raise error

    def _generate(self, action: Generate) -> None:
        rows = [PROMPTS[prompt] for prompt in action.prompts]
        positions = [[b for b in BOUNDARIES if b <= len(row)] for row in rows]
        try:
            result = generate(self.model, rows, checkpoint_positions=positions, max_new_tokens=NEW_TOKENS)
        except (ArithmeticError, torch.OutOfMemoryError):
            assert self.step_failed or self.memory_failed
            return
        assert new_tokens(result, rows) == [expected(prompt) for prompt in action.prompts]

    def _settle(self) -> None:
        for _ in range(3000):
            if all(handle.done() for _, handle, _ in self.handles):
                return
            self._turns(Turns(1))
        left = [(action, handle.status) for action, handle, _ in self.handles if not handle.done()]
        raise AssertionError(f"never ended: {left}")

    def _check(self) -> None:
        for action, handle, cancelled in self.handles:
            output = handle.output
            answer = action.answer()
            assert output.generated_tokens == answer[: len(output.generated_tokens)], (action, output)
            if output.status is HandleStatus.FINISHED:
                assert output.generated_tokens == answer
                assert action.fails_at is None or action.fails_at >= len(answer)
            elif output.status is HandleStatus.CANCELLED:
                assert cancelled
            else:
                own = action.fails_at is not None and len(output.generated_tokens) == action.fails_at
                assert own or self.step_failed or self.memory_failed, output.error
            assert output.usage is None or output.usage.cached_tokens <= output.usage.prompt_tokens

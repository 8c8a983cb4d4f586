"""Random lives of requests against a model that knows whose state every slot and row holds.

Every order of submit, step, failed step, cancel, eviction and compaction must keep the invariants of
``invariants.check_invariants``, let every request end, and never read what was not written or no longer belongs there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt_hf.errors import CheckpointRuntimeError, CheckpointValueError
from ckpt_hf.requests import Request, RequestStatus

from .invariants import check_idle, check_invariants
from .simulation import BYTES_PER_SLOT, BYTES_PER_TOKEN, Simulation

# Lengths round the grid of 64 tokens. Each level offers few alternatives, so that most prompts share a prefix.
LEVELS = ((64, 5, 1), (200, 63, 1), (65, 2), (150, 33))
BUDGETS = (64, 64, 85, 100, 127, 128, 300, 4096)


@dataclass(frozen=True)
class RandomPrompt:
    """A path through the trie of prompts, perhaps cut short; kept symbolic so that a failing example is readable."""

    path: tuple[int, ...]
    length: int
    boundaries: tuple[int, ...]
    ephemeral: tuple[int, ...]
    soft: tuple[int, ...]
    salt: str
    identity: bytes
    scoped: bool
    priority: int
    decode: bool
    pins: tuple[int, ...]

    def arguments(self) -> dict[str, Any]:
        """What ``Simulation.add`` takes."""
        return {
            "token_ids": tokens(self.path)[: self.length],
            "boundaries": self.boundaries,
            "ephemeral": self.ephemeral,
            "soft": frozenset(self.soft),
            "salt": self.salt,
            "identity": self.identity,
            "scoped": self.scoped,
            "priority": self.priority,
            "keep_answer": self.scoped,
            "decode": self.decode,
            "pins": frozenset(self.pins),
        }


def tokens(path: Sequence[int]) -> list[int]:
    """Token ids along ``path``; the first token of a stretch tells the alternatives apart."""
    stretches = ([100 * level + choice, *range(1, LEVELS[level][choice])] for level, choice in enumerate(path))
    return [token for stretch in stretches for token in stretch]


def random_prompt(rng: random.Random) -> RandomPrompt:
    """A prompt with boundaries mostly where prompts fork."""
    path = tuple(rng.randrange(len(alternatives)) for alternatives in LEVELS[: rng.choice([1, 2, 3, 4])])
    forks = [len(tokens(path[: level + 1])) for level in range(len(path))]
    length = rng.choice([forks[-1], forks[-1], forks[-1], rng.randint(1, forks[-1])])
    places = [*forks, *forks, length, rng.randint(1, length)]
    boundaries = tuple(sorted({b for b in rng.sample(places, rng.randint(0, min(4, len(places)))) if b <= length}))
    return RandomPrompt(
        path,
        length,
        boundaries,
        ephemeral=tuple(b for b in boundaries if rng.random() < 0.2),
        soft=(length,) if length in boundaries and rng.random() < 0.5 else (),
        salt=rng.choice(["", "", "", "", "other"]),
        identity=rng.choice([b"model", b"model", b"model", b"adapter"]),
        scoped=rng.random() < 0.5,
        priority=rng.choice([0, 0, 1, -2]),
        decode=rng.random() < 0.8,
        pins=boundaries[:1] if rng.random() < 0.1 else (),
    )


def prompts() -> st.SearchStrategy[RandomPrompt]:
    """One of many prompts, in no order; drawing each of their parts would take most of the time."""
    rng = random.Random(0)
    return st.sampled_from([random_prompt(rng) for _ in range(3000)])


PROMPTS = prompts()


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what callers can do between two steps or within one, and the ways in which a step can end."""

    @initialize(
        budget=st.sampled_from(BUDGETS),
        slots=st.sampled_from([None, 0, 1, 2, 4]),
        max_bytes=st.sampled_from([None, 0, 1500, 4000, 100_000]),
        max_running=st.sampled_from([None, None, 1, 2, 4]),
        memory_bytes=st.sampled_from([None, None, 4000, 8000, 20_000]),
        lease_steps=st.sampled_from([64, 1]),
        arriving=st.lists(PROMPTS, min_size=1, max_size=6),
    )
    def start(self, arriving: list[RandomPrompt], **settings: Any) -> None:
        self.sim = Simulation(**settings)
        self.arrive(arriving)

    def those_that(self, wanted: Callable[[Request], bool]) -> list[Request]:
        return [r for r in self.sim.scheduler.requests if wanted(r)]

    def decoding(self) -> list[Request]:
        return self.those_that(lambda r: r.status is RequestStatus.DECODE and not r.has_next_token)

    def fits(self, length: int) -> bool:
        limit = self.sim.scheduler.admission.limits.memory_bytes
        return limit is None or BYTES_PER_SLOT + (length + 1) * BYTES_PER_TOKEN <= limit

    def some(self, data: st.DataObject, things: list[Any]) -> list[Any]:
        rows = data.draw(st.sets(st.integers(0, len(things) - 1)), label="rows") if things else set()
        return [things[row] for row in sorted(rows)]

    def one(self, data: st.DataObject, things: Sequence[Any]) -> Any:
        return things[data.draw(st.integers(0, len(things) - 1), label="row")]

    def add(self, prompt: RandomPrompt) -> None:
        if len(self.sim.scheduler.requests) < 12:
            with (
                nullcontext()
                if self.fits(prompt.length)
                else pytest.raises(CheckpointValueError, match="bytes of memory")
            ):
                self.sim.add(**prompt.arguments())
        self.last = prompt

    @rule(arriving=st.lists(PROMPTS, min_size=1, max_size=4))
    def arrive(self, arriving: list[RandomPrompt]) -> None:
        for prompt in arriving:
            self.add(prompt)

    @rule(copies=st.integers(1, 3))
    def send_the_last_prompt_again(self, copies: int) -> None:
        for _ in range(copies):
            self.add(self.last)

    @rule(data=st.data(), steps=st.integers(1, 3), budget=st.sampled_from(BUDGETS), token=st.integers(0, 1))
    def step(self, data: st.DataObject, steps: int, budget: int, token: int) -> None:
        self.sim.scheduler.max_batch_tokens = budget
        for _ in range(steps):
            self.sim.step(self.some(data, self.decoding()), token)

    @rule(data=st.data(), how=st.sampled_from(["cancelled within", "broken", "out of memory"]))
    def disturb_a_step(self, data: st.DataObject, how: str) -> None:
        if how == "cancelled within":
            self.sim.step(self.decoding(), cancelled=self.some(data, list(self.sim.scheduler.requests)))
        elif how == "broken":
            self.sim.fail_step(self.some(data, self.decoding()), data.draw(st.sets(st.integers(0, 8)), label="pieces"))
        else:
            self.sim.fail_step(self.decoding())
            self.sim.shrink()

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "failed", "length", "eos"]))
    def finish(self, data: st.DataObject, reason: str) -> None:
        self.sim.cancel(self.one(data, self.sim.scheduler.requests), reason)

    @precondition(lambda self: any(r.reserved and r.state_in_slot for r in self.sim.scheduler.running))
    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "failed", "length"]), waiters=st.integers(0, 2))
    def lose_a_producer(self, data: st.DataObject, reason: str, waiters: int) -> None:
        """Half way to a checkpoint that others, with other boundaries or another end, may wait for."""
        producer = self.one(data, [r for r in self.sim.scheduler.running if r.reserved and r.state_in_slot])
        for i in range(waiters):
            kept = self.some(data, list(zip(producer.boundaries, producer.keys, strict=True)))
            same = self.sim.request([*producer.token_ids, i], [b for b, _ in kept])
            same.keys, same.scope = tuple(key for _, key in kept), producer.scope
            if self.fits(len(same.token_ids)):
                self.sim.scheduler.add(same)
        self.sim.cancel(producer, reason)

    @precondition(lambda self: self.sim.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.sim.preempt(self.one(data, self.sim.scheduler.running))

    @rule(data=st.data(), what=st.sampled_from(["pin", "unpin", "clear", "compact", "enforce_limits"]))
    def keep_house(self, data: st.DataObject, what: str) -> None:
        sim, checkpoints = self.sim, list(self.sim.index.checkpoints)
        if what == "pin" and checkpoints:
            with suppress(CheckpointRuntimeError):  # not ready, or no room for another pinned one
                sim.scheduler.pin(self.one(data, checkpoints))
        elif what == "unpin" and any(c.pins for c in checkpoints):
            sim.scheduler.unpin(self.one(data, [c for c in checkpoints if c.pins]))
        elif what not in ("pin", "unpin"):
            {"clear": sim.clear, "compact": sim.compact, "enforce_limits": sim.enforce_limits}[what]()

    @invariant()
    def holds(self) -> None:
        check_invariants(self.sim)

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim, requests = self.sim, self.sim.scheduler.requests
        for _ in range(500):  # every request gets to its end, whatever has happened to it
            for request in self.those_that(lambda r: len(r.token_ids) >= r.prompt_tokens + 2 and not r.has_next_token):
                if request.status is RequestStatus.DECODE:
                    sim.cancel(request, "length")
            if not sim.scheduler.requests:
                break
            sim.scheduler.ended.clear()
            plan = sim.step(self.decoding())
            assert plan is not None or sim.scheduler.ended, "requests wait and nobody runs"
            check_invariants(sim)
        assert all(r.status is RequestStatus.FINISHED for r in requests)
        for checkpoint in sim.index.checkpoints:
            while checkpoint.pins:
                sim.scheduler.unpin(checkpoint)
        sim.enforce_limits()
        check_idle(sim)
        sim.clear()
        assert sim.slots.used == sim.kv_rows.used == len(sim.index) == len(sim.index.prefixes) == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=2000,
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    print_blob=True,
)

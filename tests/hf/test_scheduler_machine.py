"""Random lives of requests against a model that knows whose state every slot and row holds.

Every order of submit, step, failed step, cancel, eviction and compaction must keep the invariants of
``invariants.check_invariants``, let every request end, and never read what was not written or no longer belongs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt_hf.requests import Request, RequestStatus

from .invariants import check_idle, check_invariants
from .simulation import Simulation

# Lengths round the grid of 64 tokens. Each level offers few alternatives, so that most prompts share a prefix.
LEVELS = ((64, 5, 1), (200, 63, 1), (65, 2), (150, 33))
BUDGETS = (100, 64, 85, 127, 128, 300, 4096)


@dataclass(frozen=True)
class RandomPrompt:
    """A path through the trie of prompts, perhaps cut short; kept symbolic so that a failing example is readable."""

    path: tuple[int, ...]
    length: int
    boundaries: tuple[int, ...]
    ephemeral: tuple[int, ...]
    salt: str
    decode: bool

    def arguments(self) -> dict[str, Any]:
        """What ``Simulation.add`` takes."""
        return {
            "token_ids": tokens(self.path)[: self.length],
            "boundaries": self.boundaries,
            "ephemeral": self.ephemeral,
            "salt": self.salt,
            "decode": self.decode,
        }


def tokens(path: Sequence[int]) -> list[int]:
    """Token ids along ``path``; the first token of a stretch tells the alternatives apart."""
    stretches = ([100 * level + choice, *range(1, LEVELS[level][choice])] for level, choice in enumerate(path))
    return [token for stretch in stretches for token in stretch]


@st.composite
def prompts(draw: st.DrawFn) -> RandomPrompt:
    """Prompts with boundaries mostly where prompts fork."""
    depth = draw(st.sampled_from([4, 3, 2, 1]))
    path = tuple(draw(st.integers(0, len(alternatives) - 1)) for alternatives in LEVELS[:depth])
    forks = [len(tokens(path[: level + 1])) for level in range(depth)]
    length = draw(st.integers(1, forks[-1])) if draw(st.integers(0, 3)) == 3 else forks[-1]
    position = st.one_of(st.sampled_from(forks), st.just(length), st.integers(1, length))
    boundaries = tuple(sorted(b for b in draw(st.sets(position, max_size=4)) if b <= length))
    ephemeral = tuple(b for b in boundaries if draw(st.integers(0, 3)) == 3)
    salt = "other" if draw(st.integers(0, 4)) == 4 else ""
    return RandomPrompt(path, length, boundaries, ephemeral, salt, decode=draw(st.integers(0, 3)) < 3)


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what callers can do between two steps, and the ways in which a step can end."""

    @initialize(
        budget=st.sampled_from(BUDGETS),
        slots=st.sampled_from([None, 0, 1, 2, 4]),
        max_bytes=st.sampled_from([None, 0, 1500, 4000, 100_000]),
        arriving=st.lists(prompts(), min_size=1, max_size=6),
    )
    def start(self, budget: int, slots: int | None, max_bytes: int | None, arriving: list[RandomPrompt]) -> None:
        self.sim = Simulation(budget, slots, max_bytes)
        self.arrive(arriving)

    def running(self) -> list[Request]:
        return [r for r in self.sim.scheduler.requests if r.status is RequestStatus.DECODE]

    def some(self, data: st.DataObject, requests: list[Request]) -> list[Request]:
        rows = data.draw(st.sets(st.integers(0, len(requests) - 1), min_size=1), label="rows")
        return [requests[row] for row in rows]

    def add(self, prompt: RandomPrompt) -> None:
        if len(self.sim.scheduler.requests) < 12:
            self.sim.add(**prompt.arguments())
        self.last = prompt

    @rule(arriving=st.lists(prompts(), min_size=1, max_size=4))
    def arrive(self, arriving: list[RandomPrompt]) -> None:
        for prompt in arriving:
            self.add(prompt)

    @rule(copies=st.integers(1, 3))
    def send_the_last_prompt_again(self, copies: int) -> None:
        for _ in range(copies):
            self.add(self.last)

    @rule(steps=st.integers(1, 3), budget=st.sampled_from(BUDGETS))
    def prefill(self, steps: int, budget: int) -> None:
        self.sim.scheduler.max_batch_tokens = budget
        for _ in range(steps):
            self.sim.prefill_step()

    @rule(broken=st.one_of(st.none(), st.sets(st.integers(0, 8))))
    def fail_prefill_step(self, broken: set[int] | None) -> None:
        self.sim.fail_step((), broken)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def decode_step(self, data: st.DataObject) -> None:
        self.sim.decode_step(self.some(data, self.running()), data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fail_decode_step(self, data: st.DataObject) -> None:
        chosen = self.some(data, self.running())
        self.sim.fail_decode_step(chosen)
        assert all(request.status is RequestStatus.FINISHED for request in chosen)

    @precondition(lambda self: self.sim.scheduler.requests)
    @rule(data=st.data(), before_its_first_token=st.booleans())
    def cancel(self, data: st.DataObject, before_its_first_token: bool) -> None:
        requests = self.sim.scheduler.requests
        if before_its_first_token:
            requests = tuple(r for r in requests if r.status is not RequestStatus.DECODE) or requests
        self.sim.cancel(requests[data.draw(st.integers(0, len(requests) - 1), label="row")])

    @rule(what=st.sampled_from(["clear", "compact", "enforce_limits"]))
    def keep_house(self, what: str) -> None:
        {"clear": self.sim.clear, "compact": self.sim.compact, "enforce_limits": self.sim.enforce_limits}[what]()

    @invariant()
    def holds(self) -> None:
        check_invariants(self.sim)

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        requests = self.sim.scheduler.requests
        self.sim.prefill()
        assert all(r.status in (RequestStatus.DECODE, RequestStatus.FINISHED) for r in requests)
        check_invariants(self.sim)
        if running := self.running():
            self.sim.decode_step(running)
        self.sim.finish_all()
        check_idle(self.sim)
        self.sim.clear()
        assert self.sim.slots.used == self.sim.kv_rows.used == len(self.sim.index) == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=1200,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    print_blob=True,
)

"""A checkpoint in the making has an owner; what happens to it when the owner does not finish."""

from __future__ import annotations

import pytest

from ckpt_hf.requests import RequestStatus

from .invariants import check_invariants, run_to_the_end
from .simulation import Simulation

WAITING, DEFERRED, PREFILL, DECODE, FINISHED = RequestStatus
ANCHOR = list(range(1000, 1200))


class TestLeases:
    def test_the_heir_goes_on_from_the_last_committed_step(self) -> None:
        sim = Simulation(64)
        producer = sim.add([*ANCHOR, 1], [200])
        heirs = [sim.add([*ANCHOR, 2 + i], [200]) for i in range(3)]
        for _ in range(2):
            sim.prefill_step()
        sim.cancel(producer)
        check_invariants(sim)
        assert [h.status for h in heirs] == [PREFILL, DEFERRED, DEFERRED]
        assert (heirs[0].position, heirs[0].cached_tokens) == (128, 128)
        sim.prefill()
        assert [h.cached_tokens for h in heirs] == [128, 200, 200]
        assert set(sim.computed.values()) == {1}, "a token was computed twice"

    @pytest.mark.parametrize("boundaries", [[100, 200], [150], [150, 180], [80, 150]])
    def test_an_heir_with_other_boundaries(self, boundaries: list[int]) -> None:
        """The state changes hands at token 64; what only the lost Producer wanted is dropped."""
        sim = Simulation(64)
        producer = sim.add(ANCHOR, [100, 150, 200])
        sim.prefill_step()
        heir = sim.add([*ANCHOR, 5], boundaries)
        check_invariants(sim)
        sim.cancel(producer)
        check_invariants(sim)
        assert heir.position == 64
        sim.prefill()
        assert [b for b in range(201) if sim.ready(ANCHOR[:b]) is not None] == boundaries
        assert set(sim.computed.values()) == {1}

    def test_the_best_of_those_who_wait_is_the_heir(self) -> None:
        sim = Simulation(64)
        producer = sim.add([*ANCHOR, 1], [100, 200])
        sim.prefill_step()
        shallow = sim.add([*ANCHOR[:100], 7], [100])
        deep = sim.add([*ANCHOR, 2], [100, 200], priority=1)
        sim.cancel(producer)
        assert (shallow.status, deep.status) == (DEFERRED, PREFILL)
        sim.prefill()
        assert shallow.cached_tokens == 100

    def test_after_a_failed_step_nothing_is_handed_over(self) -> None:
        """The state in the slot is half overwritten: the next one starts at a checkpoint or from zero."""
        sim = Simulation(64)
        producer = sim.add([*ANCHOR, 1], [200])
        heir = sim.add([*ANCHOR, 2], [200])
        sim.prefill_step()
        sim.fail_step()
        sim.cancel(producer)
        assert heir.position == 0
        plan = sim.prefill_step()
        assert plan is not None
        assert (plan.pieces[0].request, plan.pieces[0].source) == (heir, -1)

    def test_a_producer_without_progress_loses_its_lease(self) -> None:
        sim = Simulation(64, lease_steps=3)
        producer = sim.add([*ANCHOR, 1], [200], priority=-5)
        sim.prefill_step()
        waiter = sim.add([*ANCHOR, 2], [200], priority=-5)
        steps = 0
        while waiter.status is DEFERRED:
            sim.add([9 + steps] * 64, priority=5)
            sim.step()
            steps += 1
            check_invariants(sim)
        assert steps == 4
        assert producer.status is DEFERRED
        assert waiter.position == 64
        run_to_the_end(sim)

    def test_a_producer_that_reaches_its_limit_before_its_marker(self) -> None:
        sim = Simulation(64)
        producer, waiter = sim.add([*ANCHOR, 1], [200]), sim.add([*ANCHOR, 2], [200])
        sim.prefill_step()
        sim.cancel(producer, "length")
        assert producer.finish_reason == "length"
        sim.prefill()
        assert waiter.status is DECODE

    def test_cancelled_within_the_step_that_completes_its_checkpoint(self) -> None:
        """It is not published: whoever was to start from it in this very step starts again."""
        sim = Simulation(1000)
        producer, consumer = sim.add([*ANCHOR, 1], [200]), sim.add([*ANCHOR, 2], [200])
        sim.step(cancelled=[producer])
        assert sim.ready(ANCHOR) is None
        assert (consumer.status, consumer.position) == (WAITING, 0)
        check_invariants(sim)
        sim.prefill()
        assert consumer.cached_tokens == 0

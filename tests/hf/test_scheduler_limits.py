"""What may run at once: memory, number of requests, preemption. Numbers are rows of users' cases."""

from __future__ import annotations

import random

import pytest

from ckpt_hf.admission import AdmissionLimits
from ckpt_hf.errors import CheckpointRuntimeError, CheckpointValueError
from ckpt_hf.requests import RequestStatus

from .invariants import check_idle, check_invariants, run_to_the_end
from .simulation import BYTES_PER_SLOT, BYTES_PER_TOKEN, Simulation

WAITING, DEFERRED, PREFILL, DECODE, FINISHED = RequestStatus
ANCHOR = list(range(1000, 1200))


class TestLimits:
    def test_max_running(self) -> None:
        sim = Simulation(1000, max_running=2)
        requests = [sim.add([i, *ANCHOR], [1]) for i in range(5)]
        sim.step()
        assert [r.status for r in requests] == [DECODE, DECODE, WAITING, WAITING, WAITING]
        assert sim.slots.used == 4
        assert len(run_to_the_end(sim)) == 5

    def test_memory_is_never_exceeded_and_everybody_gets_through(self) -> None:
        sim = Simulation(128, memory_bytes=4 * BYTES_PER_SLOT + 500 * BYTES_PER_TOKEN)
        rng = random.Random(1)
        for i in range(30):
            sim.add([i % 3, *ANCHOR[: rng.randint(1, 199)], i], [1], priority=rng.randint(0, 2))
        assert len(run_to_the_end(sim, answer=20)) == 30

    def test_the_youngest_of_the_lowest_priority_is_preempted(self) -> None:
        sim = Simulation(256, memory_bytes=3 * (BYTES_PER_SLOT + 60 * BYTES_PER_TOKEN))
        old, urgent, young = (sim.add([i] * 50, priority=p) for i, p in ((1, 0), (2, 1), (3, 0)))
        requests = [old, urgent, young]
        sim.prefill()
        while young.status is not WAITING:
            sim.step([r for r in requests if r.status is DECODE])
            check_invariants(sim)
        assert (old.status, urgent.status) == (DECODE, DECODE)
        reached = len(young.token_ids)
        assert reached > young.prompt_tokens
        ended = run_to_the_end(sim, answer=30)
        assert ended[-1] is young
        assert young.computed_tokens > len(young.token_ids), "it was computed again, generated tokens included"

    def test_a_preempted_producer_never_waits_on_itself(self) -> None:
        sim = Simulation(64)
        producer = sim.add([*ANCHOR, 1], [200])
        consumer = sim.add([*ANCHOR, 2], [200])
        sim.prefill_step()
        sim.preempt(producer)
        check_invariants(sim)
        assert producer.status is WAITING
        sim.prefill()
        assert (producer.cached_tokens, consumer.cached_tokens) == (0, 200)

    def test_preempted_after_its_marker_it_goes_on_from_there(self) -> None:
        sim = Simulation(1000)
        request = sim.add([*ANCHOR, 1, 2], [150])
        sim.prefill()
        sim.decode_step([request])
        sim.preempt(request)
        check_invariants(sim)
        plan = sim.prefill_step()
        assert plan is not None
        assert [(p.start, p.stop) for p in plan.pieces] == [(150, 203)]
        assert (request.cached_tokens, request.prefill_stop) == (0, 203)

    @pytest.mark.parametrize("status", [WAITING, FINISHED])
    def test_only_what_runs_can_be_preempted(self, status: RequestStatus) -> None:
        sim = Simulation()
        request = sim.add([1, 2])
        if status is FINISHED:
            sim.cancel(request)
        with pytest.raises(CheckpointRuntimeError, match=f"request 1 is {status.value}; only a running"):
            sim.scheduler.preempt(request)

    def test_a_prompt_that_can_never_fit_is_refused_98(self) -> None:
        sim = Simulation(memory_bytes=BYTES_PER_SLOT + 100 * BYTES_PER_TOKEN)
        with pytest.raises(CheckpointValueError, match="token_ids of request 1 take 2010 bytes of memory; 2000 are"):
            sim.add([1] * 100)
        assert not sim.scheduler.requests
        sim.add([1] * 99)
        assert len(run_to_the_end(sim)) == 1

    def test_an_answer_that_outgrows_all_memory_ends(self) -> None:
        sim = Simulation(memory_bytes=BYTES_PER_SLOT + 100 * BYTES_PER_TOKEN)
        request = sim.add([1] * 90)
        sim.prefill()
        while request.status is DECODE:
            sim.step([request])
        assert sim.scheduler.ended == [request]
        assert request.finish_reason == "out of memory"
        assert len(request.token_ids) == 101
        check_idle(sim)

    def test_no_room_for_a_checkpoint_is_no_reason_to_wait_25(self) -> None:
        """The state of the boundary does not fit beside that of the request: it runs without saving."""
        sim = Simulation(64, memory_bytes=2 * BYTES_PER_SLOT - 1 + 201 * BYTES_PER_TOKEN)
        requests = [sim.add([*ANCHOR[:190], i], [150, 170]) for i in range(3)]
        assert len(run_to_the_end(sim)) == 3
        assert [r.cached_tokens for r in requests] == [0, 0, 0]

    def test_two_boundaries_in_the_step_that_leaves_a_slot_behind(self) -> None:
        """The old slot is still read, both checkpoints want one, and so does the request itself: too many for all."""
        sim = Simulation(300, memory_bytes=8 * BYTES_PER_SLOT)
        sim.add([*range(300, 479), *ANCHOR, *range(100)], [329, 479], ephemeral=[479])
        assert len(run_to_the_end(sim)) == 1

    def test_a_cached_checkpoint_makes_room_for_a_request(self) -> None:
        sim = Simulation(1000, memory_bytes=2 * BYTES_PER_SLOT + 201 * BYTES_PER_TOKEN)
        sim.add(ANCHOR[:100], [100], decode=False)
        sim.prefill()
        assert len(sim.index) == 1
        sim.add([7] * 199)
        sim.prefill()
        assert len(sim.index) == 0

    @pytest.mark.parametrize("name", ["max_running", "memory_bytes"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, "1"])
    def test_wrong_limits(self, name: str, value: object) -> None:
        with pytest.raises(CheckpointValueError, match=f"{name} must be None or an int >= 1"):
            AdmissionLimits(**{name: value})  # type: ignore[arg-type]

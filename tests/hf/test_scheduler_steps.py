"""Steps that mix answers and prompts, and who waits for whom in them."""

from __future__ import annotations

import itertools

import pytest

from ckpt_hf.errors import CheckpointRuntimeError
from ckpt_hf.index import CheckpointStatus
from ckpt_hf.requests import RequestStatus

from .invariants import check_invariants, run_to_the_end
from .simulation import Simulation

WAITING, DEFERRED, PREFILL, DECODE, FINISHED = RequestStatus
ANCHOR = list(range(1000, 1200))


class TestMixedSteps:
    def test_decode_comes_first_and_prompts_fill_the_rest(self) -> None:
        sim = Simulation(200)
        running = [sim.add([i, i]) for i in range(1, 4)]
        sim.prefill()
        sim.add(ANCHOR)
        plan = sim.step(running)
        assert plan is not None
        assert plan.decodes == tuple(running)
        assert [(p.start, p.stop) for p in plan.pieces] == [(0, 192)]
        assert plan.num_tokens == 195
        check_invariants(sim)

    def test_a_request_without_its_next_token_is_left_out(self) -> None:
        sim = Simulation(200)
        first, second = sim.add([1, 1]), sim.add([2, 2])
        sim.prefill()
        plan = sim.step([second])
        assert plan is not None
        assert plan.decodes == (second,)
        assert sim.step() is None
        assert (first.position, second.position) == (2, 3)

    @pytest.mark.parametrize("budget", [64, 70, 128])
    def test_many_answers_never_keep_a_prompt_away(self, budget: int) -> None:
        """With as many decoding requests as the budget holds, a long prompt would never get its chunk of 64 tokens."""
        sim = Simulation(budget)
        running = [sim.add([i]) for i in range(1, budget + 1)]
        sim.prefill()
        sim.add(ANCHOR)
        steps = 0
        while sim.scheduler.requests[-1].status is not DECODE and steps < 20:
            steps += 1
            plan = sim.step([r for r in running if not r.has_next_token])
            assert plan is not None
            assert plan.num_tokens <= budget
        assert steps <= 8
        counts = [len(r.token_ids) for r in running]
        assert max(counts) - min(counts) <= 1, "the answers do not advance in turn"

    def test_more_answers_than_the_budget_take_turns(self) -> None:
        sim = Simulation(64)
        running = [sim.add([i]) for i in range(1, 101)]
        sim.prefill()
        for _ in range(10):
            sim.step([r for r in running if not r.has_next_token])
        assert {r.position for r in running} <= {7, 8}

    def test_nothing_to_do_109(self) -> None:
        sim = Simulation()
        assert sim.step() is None
        sim.add([1, 2])
        sim.prefill()
        assert sim.step() is None, "the request has no next token yet"
        sim.finish_all()
        assert sim.step() is None

    def test_a_mixed_step_publishes_only_what_it_wrote_20(self) -> None:
        """One checkpoint is completed beside decoding rows, one is cut by the budget: only the first can be read."""
        sim = Simulation(200)
        running = [sim.add([i, i]) for i in range(1, 9)]
        sim.prefill()
        first, second = sim.add([*ANCHOR[:60], 1], [60]), sim.add(ANCHOR[::-1], [190])
        plan = sim.step(running)
        assert plan is not None
        assert [(p.request, p.start, p.stop) for p in plan.pieces if p.length] == [
            (first, 0, 60),
            (second, 0, 128),
            (first, 60, 61),
        ]
        assert sim.ready(ANCHOR[:60]) is not None
        assert sim.ready(ANCHOR[::-1][:190]) is None
        assert second.reserved[190].status is CheckpointStatus.UNREADY
        check_invariants(sim)

    def test_a_request_that_joins_a_running_batch_gets_rows_of_its_own_35_94(self) -> None:
        """Rows and slots go by request, never by its place in the batch, which changes as others end."""
        sim = Simulation(100)
        running = [sim.add([i] * 3) for i in range(1, 6)]
        sim.prefill()
        for turn in range(10):
            sim.cancel(running.pop(turn % 4))
            running.append(sim.add([50 + turn] * 3))
            sim.step([r for r in running if r.status is DECODE])
            check_invariants(sim)
        assert sim.slots.high_water <= 6

    def test_two_items_larger_than_a_step_11_84(self) -> None:
        """Boundaries right behind long stretches that cannot be cut there: each step still computes something."""
        sim = Simulation(64)
        sim.add([1] * 500, [1, 2, 249, 250, 251, 499, 500])
        sim.add([2] * 500, [250])
        for plan in sim.prefill():
            assert plan.num_tokens > 0

    def test_two_plans_at_once(self) -> None:
        sim = Simulation()
        sim.add(ANCHOR)
        plan = sim.scheduler.plan_step()
        assert plan is not None
        with pytest.raises(CheckpointRuntimeError, match="step 0 has neither been committed nor rolled back"):
            sim.scheduler.plan_step()


class TestWaiting:
    def test_a_chain_of_three_markers_across_requests_in_one_step(self) -> None:
        """Each computes the next stretch and starts from what the one before it computes in the same step."""
        sim = Simulation(1000)
        chain = [sim.add(ANCHOR[: 40 * (i + 1)], [40 * b for b in range(1, i + 2)]) for i in range(3)]
        sim.add([*ANCHOR[:120], 1], [40, 80, 120])
        plan = sim.prefill_step()
        assert plan is not None
        assert [(p.request.request_id, p.start, p.stop, p.depth) for p in plan.pieces if p.length] == [
            (1, 0, 40, 0),
            (2, 40, 80, 1),
            (3, 80, 120, 2),
            (4, 120, 121, 3),
        ]
        assert [r.cached_tokens for r in chain] == [0, 40, 80]
        check_invariants(sim)

    @pytest.mark.parametrize("budget", [64, 100, 128])
    def test_a_producer_slower_than_its_consumers(self, budget: int) -> None:
        """Its prefix takes many steps; the others wait for it, hold nothing, and an unrelated one is not held up."""
        sim = Simulation(budget)
        anchor = list(range(2000, 2900))
        producer = sim.add([*anchor, 1], [900])
        sim.prefill_step()
        consumers = [sim.add([*anchor, 2 + i], [900]) for i in range(5)]
        stranger = sim.add([5, 5, 5], priority=1)
        steps = 0
        while producer.status is PREFILL and producer.reserved:
            sim.prefill_step()
            steps += 1
            check_invariants(sim)
            assert stranger.status is DECODE
            if producer.reserved:
                assert {c.status for c in consumers} == {DEFERRED}
                assert sim.slots.used == 2, "somebody who waits has a slot"
        assert steps >= 900 // budget - 1
        sim.prefill()
        assert [c.cached_tokens for c in consumers] == [900] * 5
        assert set(sim.computed.values()) == {1}

    def test_all_wake_at_once(self) -> None:
        sim = Simulation(128)
        sim.add([*ANCHOR, 1], [200])
        sim.prefill_step()
        consumers = [sim.add([*ANCHOR, 2, i], [200]) for i in range(20)]
        sim.prefill_step()
        assert {c.status for c in consumers} == {DECODE}

    @pytest.mark.parametrize("budget", [64, 128, 1000])
    def test_any_order_of_arrival_computes_the_same_number_of_tokens(self, budget: int) -> None:
        prompts = [(ANCHOR[:90], (90,)), ([*ANCHOR[:90], 1], (90,)), ([*ANCHOR[:150], 2], (90, 150)), ([7] * 70, ())]
        totals = set()
        for order in itertools.permutations(prompts):
            sim = Simulation(budget)
            for token_ids, boundaries in order:
                sim.add(token_ids, boundaries)
                sim.step()
            run_to_the_end(sim)
            totals.add(sim.computed.total())
        assert totals == {150 + 1 + 1 + 70 + len(prompts)}, "more than the prompts and a token of each answer"

    def test_whoever_is_waited_for_goes_first(self) -> None:
        """A request of low priority computes what one of high priority waits for: it must not be overtaken."""
        sim = Simulation(64)
        producer = sim.add([*ANCHOR, 1], [200], priority=-3)
        sim.prefill_step()
        urgent = sim.add([*ANCHOR, 2], [200], priority=3)
        others = [sim.add([i] * 100) for i in range(1, 6)]
        while urgent.status is not DECODE:
            sim.prefill_step()
        assert all(o.status is WAITING for o in others)
        assert producer.position >= 200

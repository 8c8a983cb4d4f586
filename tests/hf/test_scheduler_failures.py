"""Failed steps, eviction under way, and what is left when everything has ended. Numbers are rows of users' cases."""

from __future__ import annotations

import pytest

from ckpt_hf.requests import RequestStatus

from .invariants import check_idle, check_invariants
from .simulation import BYTES_PER_SLOT, BYTES_PER_TOKEN, Simulation

ANCHOR = list(range(1000, 1200))


class TestFailedStep:
    def test_everything_is_free_again_at_once_9(self) -> None:
        sim = Simulation(1000)
        requests = [sim.add([*ANCHOR, i], [50, 200]) for i in range(3)]
        sim.fail_step()
        assert sim.slots.used == sim.kv_rows.used == len(sim.index) == 0
        assert [r.status for r in requests] == [RequestStatus.WAITING] * 3
        sim.prefill()
        assert [r.cached_tokens for r in requests] == [0, 200, 200]
        check_invariants(sim)

    def test_a_consumer_without_a_piece_restarts_with_its_producer(self) -> None:
        """The budget ends with the prefix: the consumer holds a checkpoint of a step that has no piece of it."""
        sim = Simulation(100)
        sim.add([*ANCHOR[:90]], [90], decode=False)
        consumer = sim.add([*ANCHOR[:90], *range(80)], [90])
        plan = sim.fail_step()
        assert plan is not None
        assert consumer not in {piece.request for piece in plan.pieces}
        assert consumer.status is RequestStatus.WAITING
        check_invariants(sim)
        sim.prefill()
        assert consumer.cached_tokens == 90

    def test_earlier_checkpoints_survive(self) -> None:
        sim = Simulation(64)
        request = sim.add(ANCHOR, [64, 150])
        sim.prefill_step()
        sim.fail_step()
        assert sim.ready(ANCHOR[:64]) is not None
        sim.prefill()
        assert (request.cached_tokens, request.computed_tokens) == (64, 200)

    def test_a_restarted_request_protects_its_prefix_again(self) -> None:
        """It had gone on from its first boundary and nobody needed it any more; now it is needed again."""
        sim = Simulation(64, slots=0)
        request = sim.add(ANCHOR, [64])
        second = sim.add([*ANCHOR[:64], 1], [64])
        sim.prefill_step()
        sim.prefill_step()
        sim.fail_step()
        assert request.demanded == set(request.keys)
        sim.cancel(second)
        assert sim.ready(ANCHOR[:64]) is not None
        sim.prefill()
        assert request.cached_tokens == 64
        check_invariants(sim)

    def test_after_a_failed_decode_step_the_answer_is_computed_again(self) -> None:
        """Its state may be half overwritten, so it starts again from its checkpoint, its own tokens included."""
        sim = Simulation(1000)
        broken, spared = sim.add([*ANCHOR, 1], [200]), sim.add([*ANCHOR, 2], [200])
        sim.prefill()
        sim.decode_step([broken, spared])
        sim.fail_step([broken])
        assert (broken.status, broken.slot, broken.kv) == (RequestStatus.WAITING, None, None)
        check_invariants(sim)
        plan = sim.step([spared])
        assert plan is not None
        assert [(p.request, p.start, p.stop) for p in plan.pieces] == [(broken, 200, 203)]
        assert (plan.decodes, broken.status) == ((spared,), RequestStatus.DECODE)
        check_invariants(sim)

    def test_restarted_request_never_reads_what_the_failed_step_wrote_10_90(self) -> None:
        sim = Simulation(64)
        request = sim.add(ANCHOR)
        sim.prefill_step()
        sim.fail_step()
        assert (request.position, request.slot, request.state_in_slot) == (0, None, False)
        plans = sim.prefill()
        assert (plans[0].pieces[0].start, plans[0].pieces[0].source) == (0, -1)


class TestReuse:
    def test_a_slot_with_a_new_owner_starts_from_zero_19_87(self) -> None:
        sim = Simulation(1000)
        first = sim.add([1, 2, 3])
        sim.prefill()
        slot = first.slot
        sim.cancel(first)
        second = sim.add([4, 5])
        plan = sim.prefill_step()
        assert plan is not None
        assert second.slot == slot
        assert plan.pieces[0].source == -1

    def test_a_thousand_requests_leave_nothing_behind_93_105(self) -> None:
        sim = Simulation(4096, slots=4)
        for i in range(250):
            requests = [sim.add([*ANCHOR[: 10 + i % 7], i, j], [10 + i % 7]) for j in range(4)]
            sim.prefill()
            sim.decode_step(requests)
            sim.finish_all()
        check_invariants(sim)
        assert sim.slots.high_water <= 9
        assert len(sim.index) == 4

    def test_compaction_keeps_the_checkpoints(self) -> None:
        sim = Simulation(1000)
        requests = [sim.add([i, *ANCHOR, i], [201]) for i in range(4)]
        sim.prefill()
        sim.finish_all()
        for kept in (0, 2):
            sim.index.drop(next(c for c in sim.index.checkpoints if c.token_ids[0] == kept))
        sim.compact()
        assert (sim.slots.high_water, sim.kv_rows.high_water) == (2, 402)
        again = [sim.add(r.token_ids[:202], [201]) for r in requests]
        sim.prefill()
        assert [r.cached_tokens for r in again] == [0, 201, 0, 201]
        check_invariants(sim)


class TestLimits:
    def test_no_room_for_any_checkpoint_still_shares_within_the_call_25(self) -> None:
        sim = Simulation(64, slots=0)
        requests = [sim.add([*ANCHOR, i], [200]) for i in range(3)]
        sim.prefill()
        assert [r.cached_tokens for r in requests] == [0, 200, 200]
        assert len(sim.index) == 0
        again = sim.add([*ANCHOR, 9], [200])
        sim.prefill()
        assert (again.cached_tokens, again.reasons) == (0, {200: "evicted"})

    def test_a_state_larger_than_the_budget_25(self) -> None:
        sim = Simulation(1000, max_bytes=BYTES_PER_SLOT - 1)
        sim.add([*ANCHOR, 1], [200])
        sim.prefill()
        sim.finish_all()
        check_idle(sim)
        assert len(sim.index) == 0

    def test_bytes_of_tokens_count(self) -> None:
        sim = Simulation(1000, max_bytes=2 * BYTES_PER_SLOT + 200 * BYTES_PER_TOKEN)
        for boundaries in ([100], [200], [199, 200]):
            sim.add([*ANCHOR, 1], boundaries)
            sim.prefill()
            sim.finish_all()
            check_idle(sim)
        assert sim.ready(ANCHOR) is not None

    def test_a_hit_counts_as_use(self) -> None:
        sim = Simulation(1000, slots=2)
        for name in (1, 2, 1, 3):
            sim.add([name, name, 9], [2])
            sim.prefill()
            sim.finish_all()
        assert [sim.ready([name, name]) is not None for name in (1, 2, 3)] == [True, False, True]

    def test_prefix_in_demand_outlives_a_more_recent_one(self) -> None:
        sim = Simulation(64, slots=1)
        sim.add([*ANCHOR[:64], 1], [64])
        sim.prefill_step()
        waiter = sim.add([*ANCHOR[:64], 2], [64])
        recent = sim.add([7] * 64, [64], decode=False)
        sim.prefill()
        assert recent.status is RequestStatus.FINISHED
        assert waiter.cached_tokens == 64

    def test_ephemeral_boundary_is_shared_and_forgotten(self) -> None:
        sim = Simulation(64)
        requests = [sim.add(ANCHOR[:100], [100], ephemeral=[100]) for _ in range(3)]
        sim.prefill()
        assert [r.cached_tokens for r in requests] == [0, 100, 100]
        sim.finish_all()
        assert len(sim.index) == sim.slots.used == 0

    @pytest.mark.parametrize("ephemeral_first", [True, False])
    def test_who_wants_to_keep_it_decides(self, ephemeral_first: bool) -> None:
        sim = Simulation(1000)
        for ephemeral in (ephemeral_first, not ephemeral_first):
            sim.add([*ANCHOR, int(ephemeral)], [200], ephemeral=[200] if ephemeral else [])
        sim.prefill()
        sim.finish_all()
        assert sim.ready(ANCHOR) is not None

    def test_clearing_while_requests_run(self) -> None:
        sim = Simulation(64)
        running = sim.add([*ANCHOR, 1], [64, 150])
        waiting = sim.add([*ANCHOR, 2], [64, 150])
        sim.prefill_step()
        sim.prefill_step()
        sim.clear()
        check_invariants(sim)
        sim.prefill()
        sim.decode_step([running, waiting])
        check_invariants(sim)

"""Rules of one step, one by one. Numbers in names are rows of the cases that users reported elsewhere."""

from __future__ import annotations

import itertools

import pytest

from ckpt_hf import keys
from ckpt_hf.index import CheckpointStatus
from ckpt_hf.requests import RequestStatus

from . import simulation
from .invariants import check_invariants
from .simulation import Simulation

WAITING, DEFERRED, PREFILL, DECODE, FINISHED = RequestStatus
ANCHOR = list(range(1000, 1200))


def pieces(sim: Simulation) -> list[tuple[int, int, int]]:
    """Request, start and stop of each piece of the next step, which is run."""
    plan = sim.prefill_step()
    assert plan is not None
    check_invariants(sim)
    return [(piece.request.request_id, piece.start, piece.stop) for piece in plan.pieces]


class TestPieces:
    def test_cut_at_every_boundary_of_the_request(self) -> None:
        sim = Simulation(1000)
        sim.add(ANCHOR, [1, 70, 199])
        assert pieces(sim) == [(1, 0, 1), (1, 1, 70), (1, 70, 199), (1, 199, 200)]
        assert [sim.ready(ANCHOR[:b]) is not None for b in (1, 70, 199, 200)] == [True, True, True, False]

    @pytest.mark.parametrize(
        ("budget", "cuts"),
        [(1, [74, 138]), (64, [74, 138]), (100, [74, 138]), (127, [74]), (138, [138]), (199, [138]), (200, [])],
    )
    def test_the_budget_cuts_on_the_grid_that_starts_at_the_boundary(self, budget: int, cuts: list[int]) -> None:
        sim = Simulation(budget)
        sim.add(ANCHOR, [10])
        stops = [piece.stop for plan in sim.prefill() for piece in plan.pieces]
        assert stops == [10, *cuts, 200]

    def test_a_prefix_longer_than_the_budget(self) -> None:
        sim = Simulation(64)
        requests = [sim.add([*ANCHOR, i], [150]) for i in range(2)]
        stops = [(p.request.request_id, p.stop) for plan in sim.prefill() for p in plan.pieces]
        assert stops == [(1, 64), (1, 128), (1, 150), (1, 201), (2, 201)]
        assert requests[1].cached_tokens == 150

    def test_zero_tokens_are_never_a_step_11_98(self) -> None:
        """A long prompt takes what is left of the budget on its grid, and one that gets nothing goes on afterwards."""
        sim = Simulation(100)
        sim.add(ANCHOR[:70])
        sim.add(ANCHOR[::-1])
        assert pieces(sim) == [(1, 0, 70)]
        assert pieces(sim) == [(2, 0, 64)]
        assert sim.scheduler.requests[1].status is PREFILL

    def test_a_running_prompt_goes_on_at_a_boundary_in_a_fresh_slot(self) -> None:
        """The step that reads the state of the first chunk must not write the rest of the prompt over it."""
        sim = Simulation(64)
        request = sim.add(ANCHOR[:100], [96])
        assert pieces(sim) == [(1, 0, 64)]
        assert pieces(sim) == [(1, 64, 96), (1, 96, 100)]
        assert request.status is DECODE
        assert sim.slots.used == 2

    def test_short_prompts_are_checkpointed_100(self) -> None:
        sim = Simulation()
        sim.add([5, 6], [1])
        assert pieces(sim) == [(1, 0, 1), (1, 1, 2)]
        assert sim.ready([5]) is not None

    def test_without_a_marker_nothing_is_kept_103(self) -> None:
        sim = Simulation()
        requests = [sim.add(ANCHOR[:40]) for _ in range(3)]
        sim.prefill()
        assert not len(sim.index)
        assert sim.slots.used == len(requests)
        sim.finish_all()
        assert sim.slots.used == sim.kv_rows.used == 0


class TestSharing:
    def test_consumers_in_the_step_of_their_producer_106(self) -> None:
        sim = Simulation(1000)
        requests = [sim.add([*ANCHOR, i, i], [200]) for i in range(4)]
        plan = sim.prefill_step()
        assert plan is not None
        assert [(p.start, p.stop, p.depth, p.parent) for p in plan.pieces] == [
            (0, 200, 0, -1),
            *[(200, 202, 1, 0)] * 4,
        ]
        assert [r.cached_tokens for r in requests] == [0, 200, 200, 200]
        check_invariants(sim)

    def test_chain_of_three_markers(self) -> None:
        sim = Simulation(1000)
        first = sim.add([*ANCHOR, 1], [50, 100, 150])
        others = [sim.add([*ANCHOR[: chain[-1]], 2], chain) for chain in ([50], [50, 100], [50, 100, 150])]
        plan = sim.prefill_step()
        assert plan is not None
        assert [p.depth for p in plan.pieces if p.request is first] == [0, 1, 2, 3]
        assert [next(p.depth for p in plan.pieces if p.request is r) for r in others] == [1, 2, 3]
        assert [r.cached_tokens for r in others] == [50, 100, 150]
        assert max(sim.computed[number] for number in sim.histories.prefixes(ANCHOR)) == 1

    @pytest.mark.parametrize("budget", [64, 130, 1000])
    def test_any_order_of_arrival_computes_each_prefix_once(self, budget: int) -> None:
        prompts = [
            (ANCHOR[:90], (90,)),
            ([*ANCHOR[:90], 1, 2], (90,)),
            ([*ANCHOR[:150], 3], (90, 150)),
            ([*ANCHOR[:150], 4], (90, 150)),
            ([5, *ANCHOR[:70]], (1,)),
        ]
        for order in itertools.permutations(prompts):
            sim = Simulation(budget)
            for token_ids, boundaries in order:
                sim.add(token_ids, boundaries)
            sim.prefill()
            check_invariants(sim)
            assert set(sim.computed.values()) == {1}
            assert sim.computed.total() == 150 + 2 + 1 + 1 + 71

    def test_prefix_of_a_longer_prompt_24(self) -> None:
        sim = Simulation(64)
        longer, shorter = sim.add([*ANCHOR, *ANCHOR], [100]), sim.add([*ANCHOR[:100], 7, 7, 7], [100])
        sim.prefill()
        assert (longer.cached_tokens, shorter.cached_tokens) == (0, 100)

    @pytest.mark.parametrize("budget", [64, 100, 1000])
    def test_the_same_prompt_up_to_its_end(self, budget: int) -> None:
        """The first computes the last token's logits, the others take them over, in the same step or a later one."""
        sim = Simulation(budget)
        requests = [sim.add(ANCHOR[:100], [100]) for _ in range(3)]
        sim.prefill()
        assert [r.cached_tokens for r in requests] == [0, 100, 100]
        assert sim.computed.total() == 100
        assert sim.index.checkpoints[0].logits is not None
        check_invariants(sim)

    def test_prompt_that_ends_at_an_earlier_prompts_checkpoint_computes_nothing(self) -> None:
        sim = Simulation(64)
        sim.add([*ANCHOR, 1], [100])
        sim.prefill()
        sim.computed.clear()
        requests = [sim.add(ANCHOR[:100], [100]) for _ in range(3)]
        sim.prefill()
        assert [r.cached_tokens for r in requests] == [100] * 3
        assert not sim.computed
        check_invariants(sim)

    def test_only_the_checkpoint_is_wanted(self) -> None:
        sim = Simulation(64)
        request = sim.add(ANCHOR[:100], [100], decode=False)
        again = sim.add(ANCHOR[:100], [100], decode=False)
        sim.prefill()
        assert request.status is again.status is FINISHED
        assert again.computed_tokens == 0
        assert sim.ready(ANCHOR[:100]) is not None
        assert sim.slots.used == 1

    @pytest.mark.parametrize("salts", [("a", "b"), ("", "a")])
    def test_salts_never_share(self, salts: tuple[str, str]) -> None:
        sim = Simulation(1000)
        requests = [sim.add([*ANCHOR, 1], [200], salt=salt) for salt in salts]
        sim.prefill()
        assert [r.cached_tokens for r in requests] == [0, 0]
        assert len(sim.index) == 2

    def test_a_digest_collision_never_shares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def collide(token_ids: object, boundaries: list[int], identity: bytes, salt: str) -> tuple[bytes, ...]:
            return (bytes(keys.DIGEST_BYTES),) * len(boundaries)

        monkeypatch.setattr(simulation, "checkpoint_keys", collide)
        sim = Simulation(64)
        first, second = sim.add([*ANCHOR, 1], [30, 150]), sim.add([*ANCHOR[::-1], 1], [150])
        third = sim.add([*ANCHOR, 2], [30])
        sim.prefill()
        check_invariants(sim)
        assert [r.cached_tokens for r in (first, second, third)] == [0, 0, 30]
        assert len(sim.index) == 1


class TestWaiting:
    def test_waits_for_a_prefix_in_the_making_and_holds_nothing(self) -> None:
        sim = Simulation(100)
        producer = sim.add(ANCHOR, [150])
        assert pieces(sim) == [(1, 0, 64)]
        waiter, stranger = sim.add([*ANCHOR[:150], 1], [150]), sim.add(list(range(20)))
        sim.scheduler.max_batch_tokens = 85  # one chunk of the prefix, which lacks 86 tokens, and 21 for others
        assert pieces(sim) == [(1, 64, 128), (3, 0, 20)]
        assert (producer.status, waiter.status, stranger.status) == (PREFILL, DEFERRED, DECODE)
        assert waiter.reasons == {150: "unready"}
        assert (waiter.slot, waiter.kv, waiter.base, waiter.reserved) == (None, None, None, {})
        sim.scheduler.max_batch_tokens = 100
        sim.prefill()
        assert (waiter.cached_tokens, waiter.reasons) == (150, {})

    @pytest.mark.parametrize("how", ["cancel", "fail"])
    def test_a_waiter_takes_over_from_a_lost_producer(self, how: str) -> None:
        sim = Simulation(64)
        producer = sim.add(ANCHOR, [150])
        waiters = [sim.add([*ANCHOR[:150], i], [150]) for i in range(2)]
        sim.prefill_step()
        checkpoint = producer.reserved[150]
        if how == "cancel":
            sim.cancel(producer)
        else:
            sim.fail_step()
            assert producer.status is WAITING
            assert checkpoint.status is CheckpointStatus.ABSENT
        check_invariants(sim)
        sim.prefill()
        assert [r.cached_tokens for r in waiters] == ([64, 150] if how == "cancel" else [150, 150])
        check_invariants(sim)

    def test_the_same_prompt_again_after_a_cancelled_prefill_18_86(self) -> None:
        sim = Simulation(64)
        first = sim.add(ANCHOR, [100, 150])
        sim.prefill_step()
        sim.cancel(first)
        assert sim.slots.used == sim.kv_rows.used == 0
        second = sim.add(ANCHOR, [100, 150])
        sim.prefill()
        assert (second.cached_tokens, second.computed_tokens) == (0, 200)

    def test_cancelled_between_submission_and_first_step_8(self) -> None:
        sim = Simulation(64)
        first, second = sim.add(ANCHOR, [100]), sim.add(ANCHOR, [100])
        sim.cancel(first)
        sim.cancel(first)  # a second time is harmless
        sim.prefill()
        assert second.computed_tokens == 200
        sim.finish_all()
        check_invariants(sim)

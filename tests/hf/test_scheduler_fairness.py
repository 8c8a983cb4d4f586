"""Who runs when many wait: priorities, ageing, fairness between anchors."""

from __future__ import annotations

import random

from ckpt_hf.priorities import STEPS_A_PRIORITY, Ranking
from ckpt_hf.requests import Request, RequestStatus

from .invariants import run_to_the_end
from .simulation import Simulation

WAITING, DEFERRED, PREFILL, DECODE, FINISHED = RequestStatus
ANCHOR = list(range(1000, 1200))


class TestPriorities:
    def test_larger_priority_first_then_arrival(self) -> None:
        sim = Simulation(64)
        requests = [sim.add([i] * 60, priority=p) for i, p in enumerate([0, 1, 0, 2, -1], 1)]
        assert [r.request_id for r in run_to_the_end(sim)] == [4, 2, 1, 3, 5]
        assert {r.finish_reason for r in requests} == {"length"}

    def test_nobody_starves(self) -> None:
        """A stream of urgent requests that fills every step; an ordinary one still gets through, and when is known."""
        sim = Simulation(64)
        patient = sim.add([1] * 60, priority=0)
        for step in range(3 * STEPS_A_PRIORITY):
            sim.add([2 + step] * 60, priority=1)
            sim.step()
            for request in sim.scheduler.requests:
                if request.status is DECODE:
                    sim.cancel(request, "length")
            if patient.status is FINISHED:
                break
        assert STEPS_A_PRIORITY - 1 <= step <= STEPS_A_PRIORITY + 1

    def test_a_large_anchor_does_not_keep_a_small_one_away(self) -> None:
        """Without fairness between anchors the late one would wait for all 400 steps of the first."""
        sim = Simulation(64)
        crowd = [sim.add([9, 9, *[i] * 60], [2]) for i in range(400)]
        for _ in range(40):
            sim.step()
        late = [sim.add([8, 8, *[i] * 60], [2]) for i in range(4)]
        steps = 0
        while any(r.status is not DECODE for r in late):
            sim.step()
            steps += 1
        assert steps < 50
        assert sum(r.status is WAITING for r in crowd) > 300

    def test_one_anchor_stays_together_within_its_share(self) -> None:
        """Anchors that arrive interleaved run one after the other, so that few checkpoints are needed at once."""
        sim = Simulation(60 + 4 * 4)
        for i in range(4):
            for anchor in (1, 2, 3):
                sim.add([anchor] * 60 + [100 + i] * 4, [60])
        anchors = [{p.request.token_ids[0] for p in plan.pieces} for plan in sim.prefill()]
        assert anchors == [{1}, {2}, {3}]

    def test_ranking_forgets_those_who_left(self) -> None:
        ranking = Ranking()
        requests = [Request(i, [1, 2, 3], (1,), (bytes([i % 3]),)) for i in range(9)]
        for request in requests:
            ranking.enter(request, 0, 64)
        random.Random(0).shuffle(requests)
        for request in requests:
            ranking.leave(request)
            ranking.leave(request)
        assert len(ranking) == 0

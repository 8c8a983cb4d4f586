"""The moves that a request may make, and what the scheduler refuses to take in."""

from __future__ import annotations

import pytest

from ckpt_hf.errors import CheckpointRuntimeError, CheckpointValueError
from ckpt_hf.requests import REQUEST_TRANSITIONS, Request, RequestStatus

from .invariants import check_invariants
from .simulation import Simulation

WAITING, DEFERRED, PREFILL, DECODE, FINISHED = RequestStatus
LEGAL = {
    *((WAITING, DEFERRED), (WAITING, PREFILL), (WAITING, FINISHED), (DEFERRED, PREFILL), (DEFERRED, FINISHED)),
    *((PREFILL, WAITING), (PREFILL, DECODE), (PREFILL, FINISHED), (DECODE, WAITING), (DECODE, FINISHED)),
}


@pytest.mark.parametrize("before", RequestStatus)
@pytest.mark.parametrize("after", RequestStatus)
def test_transition_table(before: RequestStatus, after: RequestStatus) -> None:
    request = Request(9, [1], (), (), status=before)
    assert (after in REQUEST_TRANSITIONS[before]) == ((before, after) in LEGAL)
    if (before, after) in LEGAL:
        request.move(after)
        assert request.status is after
    else:
        with pytest.raises(CheckpointRuntimeError, match=f"request 9 cannot go from {before.value} to {after.value}"):
            request.move(after)
        assert request.status is before


class TestAdd:
    @pytest.mark.parametrize("boundaries", [(0,), (4,), (-1,), (2, 2), (3, 1), (1, 2, 9)])
    def test_boundaries_outside_the_prompt(self, boundaries: tuple[int, ...]) -> None:
        sim = Simulation()
        request = Request(5, [1, 2, 3], boundaries, tuple(bytes([b % 256]) for b in boundaries))
        with pytest.raises(CheckpointValueError, match=r"boundaries .* of request 5 must increase .* between 1 and 3"):
            sim.scheduler.add(request)
        assert not sim.scheduler.requests
        assert not sim.index.demand

    def test_empty_prompt(self) -> None:
        with pytest.raises(CheckpointValueError, match="token_ids of request 1 are empty"):
            Simulation().add([])

    def test_an_id_twice(self) -> None:
        sim = Simulation()
        first = sim.add([1, 2], [1])
        second = Request(first.request_id, [3], (), ())
        with pytest.raises(CheckpointValueError, match="request_id 1 is already scheduled"):
            sim.scheduler.add(second)
        sim.cancel(second)
        assert sim.scheduler.requests == (first,), "ending the refused request ended the other one"
        check_invariants(sim)

    def test_a_finished_request(self) -> None:
        sim = Simulation()
        request = sim.add([1, 2], [1])
        sim.cancel(request)
        with pytest.raises(CheckpointValueError, match="request 1 is finished; a request can be added once"):
            sim.scheduler.add(request)

    def test_ending_a_request_that_was_never_added(self) -> None:
        sim = Simulation()
        request = sim.request([1, 2], [1])
        sim.cancel(request)
        assert request.status is FINISHED
        check_invariants(sim)

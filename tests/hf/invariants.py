"""What must hold for scheduler, index, slots and rows between any two steps, whatever has happened before."""

from __future__ import annotations

from collections import Counter

from ckpt_hf.checkpoint import Retention
from ckpt_hf.index import CheckpointStatus
from ckpt_hf.requests import Request, RequestStatus

from .simulation import WAITS, Simulation


def check_invariants(sim: Simulation) -> None:
    """Raise AssertionError or the project's own error on the first thing that is wrong."""
    _check_requests(sim)
    _check_waiting(sim)
    _check_checkpoints(sim)
    _check_owners(sim)
    if not sim.scheduler.requests:
        check_idle(sim)


def check_idle(sim: Simulation) -> None:
    """With no request left only ready checkpoints own anything, nobody has a claim on them, and the limits hold."""
    checkpoints = sim.index.checkpoints
    assert not len(sim.scheduler.waiting)
    assert not len(sim.scheduler._ranking)
    assert not sim.scheduler.running
    assert all(
        c.status is CheckpointStatus.READY and not c.leases and (c.pins or c.retention is not Retention.EPHEMERAL)
        for c in checkpoints
    )
    assert not sim.index.demand
    assert sim.slots.used == len(checkpoints)
    paths = {segment for c in checkpoints if c.kv is not None for segment in c.kv.path()}
    assert sim.kv_rows.segments == paths
    assert sim.kv_rows.used == sum(map(len, paths))
    limits = sim.index.limits
    assert limits.slots is None or len(checkpoints) <= limits.slots
    assert limits.bytes is None or sim.index.bytes_used() <= limits.bytes


def _check_requests(sim: Simulation) -> None:
    demand: Counter[bytes] = Counter()
    for request in sim.scheduler.requests:
        assert request.status is not RequestStatus.FINISHED
        assert request.retired_slot is None
        demand.update(request.demanded)
        if request.status in WAITS:
            assert request.slot is None
            assert request.kv is None
            assert request.base is None
            assert not request.reserved
            assert not request.state_in_slot
            assert request.position == 0
            assert request.demanded == set(request.keys), "a waiting request does not hold on to what it waits for"
        if request.base is not None:
            assert request.base.status is CheckpointStatus.READY
            assert len(request.base.token_ids) == request.position
        if request.state_in_slot:
            assert request.slot is not None
            assert sim.states.get(request.slot) == sim.histories.of(request)[request.position]
        if request.status is RequestStatus.DECODE:
            assert request.state_in_slot
            assert request.kv is not None
            assert not request.reserved
            assert not request.demanded
            seen = [sim.rows.get(row) for segment in request.kv.path() for row in segment.rows]
            assert seen == sim.histories.of(request)[1 : request.position + 1]
    assert sim.index.demand == demand


def _check_waiting(sim: Simulation) -> None:
    """Whoever waits is in exactly one group, and a group is closed exactly while somebody computes its checkpoint."""
    waiting, running = sim.scheduler.waiting, sim.scheduler.running
    assert len(waiting) + len(running) == len(sim.scheduler.requests)
    for request in sim.scheduler.requests:
        waits = request.status in WAITS
        assert (request in waiting) == waits
        assert (request in running) != waits
        assert request.in_step is None
        if not waits:
            continue
        group = waiting._places[request.request_id]
        checkpoint = sim.index.get(group.key) if group.key is not None else None
        assert group.closed == (checkpoint is not None and checkpoint.status is CheckpointStatus.UNREADY)
        assert request.status is RequestStatus.DEFERRED or not group.closed


def _check_checkpoints(sim: Simulation) -> None:
    leases = Counter(r.base for r in sim.scheduler.requests if r.base is not None)
    produced = {c for r in sim.scheduler.requests for c in r.reserved.values()}
    for checkpoint in sim.index.checkpoints:
        assert checkpoint.leases == leases[checkpoint]
        history = sim.histories.of(checkpoint)
        if checkpoint.status is CheckpointStatus.READY:
            assert checkpoint.slot is not None
            assert checkpoint.kv is not None
            assert sim.states.get(checkpoint.slot) == history[-1], "a ready checkpoint holds another state"
            seen = [sim.rows.get(row) for segment in checkpoint.kv.path() for row in segment.rows]
            assert seen == history[1:], "a ready checkpoint has other keys and values"
            assert checkpoint.logits in (None, history[-1])
        else:
            assert checkpoint.status is CheckpointStatus.UNREADY
            assert checkpoint in produced, "nobody computes an unready checkpoint"
            assert not checkpoint.leases
    ready = [c for c in sim.index.checkpoints if c.status is CheckpointStatus.READY]
    assert sim.index.bytes_used() == sim.index._kept.together(ready)
    unready = {c for c in sim.index.checkpoints if c.status is CheckpointStatus.UNREADY}
    assert produced == unready


def _check_owners(sim: Simulation) -> None:
    requests, checkpoints = sim.scheduler.requests, sim.index.checkpoints
    with_slot = [r.request_id for r in requests if r.slot is not None]
    sim.slots.check_integrity([*with_slot, *(c.key for c in checkpoints if c.slot is not None)])
    for request in requests:
        assert request.slot is None or sim.slots.owner(request.slot) == request.request_id
    for checkpoint in checkpoints:
        assert checkpoint.slot is None or sim.slots.owner(checkpoint.slot) == checkpoint.key
    sim.kv_rows.check_integrity()
    holders = Counter(request.kv for request in requests if request.kv is not None)
    holders.update(checkpoint.kv for checkpoint in checkpoints if checkpoint.kv is not None)
    holders.update(segment.parent for segment in sim.kv_rows.segments if segment.parent is not None)
    assert holders == {segment: segment.refs for segment in sim.kv_rows.segments}


def run_to_the_end(sim: Simulation, answer: int = 1, steps: int = 3000) -> list[Request]:
    """Steps until every request has ``answer`` tokens; the requests in the order in which they ended."""
    ended: list[Request] = []
    for _ in range(steps):
        requests = sim.scheduler.requests
        if not requests:
            check_idle(sim)
            return ended
        running = [r for r in requests if r.status is RequestStatus.DECODE and not r.has_next_token]
        for request in [r for r in running if len(r.token_ids) - r.prompt_tokens >= answer]:
            sim.cancel(request, "length")
            ended.append(request)
            running.remove(request)
        assert sim.step(running) is not None or not sim.scheduler.requests, "nothing runs although requests wait"
        check_invariants(sim)
    raise AssertionError(f"{len(sim.scheduler.requests)} requests have not ended after {steps} steps")

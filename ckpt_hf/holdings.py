"""What requests and checkpoints own, and how it changes hands: slots, rows, leases, the right to compute."""

from __future__ import annotations

from .checkpoint import Checkpoint, CheckpointStatus, Retention
from .index import CheckpointIndex
from .keys import CONTENT
from .requests import Request, RequestStatus

_COMPLETE_ANSWERS = {"eos", "stop", "length"}


def set_base(index: CheckpointIndex, request: Request, checkpoint: Checkpoint | None) -> None:
    """Hold the checkpoint that the request's next piece starts from; None lets go of the last one."""
    if checkpoint is not None:
        index.lease(checkpoint)
    last, request.base = request.base, checkpoint
    if last is not None:
        index.unlease(last)


def release_all(index: CheckpointIndex, request: Request) -> None:
    """Free slot and rows of ``request``."""
    set_base(index, request, None)
    if request.kv is not None:
        index.kv_rows.release(request.kv)
        request.kv = None
    if request.slot is not None:
        index.slots.release(request.slot, request.request_id)
        request.slot = None
    release_retired(index, request)
    request.state_in_slot = False


def release_retired(index: CheckpointIndex, request: Request) -> None:
    """Free the slot whose state the last step read."""
    if request.retired_slot is not None:
        index.slots.release(request.retired_slot, request.request_id)
        request.retired_slot = None


def advance(
    index: CheckpointIndex, request: Request, stop: int, destination: int, published: Checkpoint | None
) -> None:
    """A piece of ``request`` up to ``stop`` has been committed, its final state in ``destination``."""
    request.computed_tokens += stop - request.position
    request.position = stop
    if published is not None:
        index.publish(published)
        request.reserved.pop(stop, None)
        release_retired(index, request)
    if destination == request.slot:
        request.state_in_slot = True
        set_base(index, request, None)
    elif published is not None:
        request.state_in_slot = False
        set_base(index, request, published)


def keep_answer(index: CheckpointIndex, request: Request, reason: str) -> Checkpoint | None:
    """Make the state of a request that has answered in full a soft checkpoint: the next turn may start there.

    Slot and rows change hands, so it costs no computation and no copy.
    """
    complete = reason in _COMPLETE_ANSWERS and request.status is RequestStatus.DECODE and request.in_step is None
    if not (complete and request.keep_answer and request.scope is not None and request.state_in_slot):
        return None
    tokens = request.token_ids[: request.position]
    (key,) = request.scope.keys(tokens, [request.position], request.media)
    (content,) = CONTENT.keys(tokens, [request.position], request.media)
    checkpoint = index.reserve(key, tokens, request.request_id, Retention.SOFT, request.scope, content)
    if checkpoint is None:
        return None
    assert request.slot is not None
    index.slots.transfer(request.slot, request.request_id, key)
    checkpoint.slot, checkpoint.kv = request.slot, request.kv
    request.slot = request.kv = None
    request.state_in_slot = False
    index.publish(checkpoint)
    return checkpoint


def can_hand_over(request: Request) -> bool:
    """Whether the state of a Producer, as of its last committed step, is in its slot and leads to a checkpoint."""
    running = request.status is RequestStatus.PREFILL and request.in_step is None
    return running and request.state_in_slot and bool(request.reserved)


def unready(request: Request) -> list[Checkpoint]:
    """Checkpoints that ``request`` still computes."""
    return [c for c in request.reserved.values() if c.status is CheckpointStatus.UNREADY]

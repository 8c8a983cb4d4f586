"""Who computes a checkpoint: taking it on, giving it up, and taking it over from somebody who will not finish it."""

from __future__ import annotations

from collections.abc import Sequence

from .checkpoint import Checkpoint
from .index import CheckpointIndex
from .requests import Request


def reserve_missing(index: CheckpointIndex, request: Request) -> list[Checkpoint]:
    """Announce that ``request`` computes the checkpoints after its position that nobody has."""
    contents = request.contents or (b"",) * len(request.keys)
    taken = []
    for boundary, key, content in zip(request.boundaries, request.keys, contents, strict=True):
        if boundary > request.position and boundary not in request.reserved and index.get(key) is None:
            checkpoint = index.reserve(
                key,
                request.token_ids[:boundary],
                request.request_id,
                request.retention(boundary),
                request.scope,
                content,
            )
            assert checkpoint is not None
            if request.scope is not None:
                checkpoint.packed = request.packed(boundary)
            request.reserved[boundary] = checkpoint
            taken.append(checkpoint)
    return taken


def give_up(index: CheckpointIndex, request: Request, boundary: int) -> Checkpoint:
    """``request`` runs on without saving at ``boundary``; the rows computed so far stay with it."""
    checkpoint = request.reserved.pop(boundary)
    rows, checkpoint.kv = checkpoint.kv, None
    index.drop(checkpoint)
    if rows is not None:
        later = [b for b in request.reserved if b > boundary]
        if later:
            request.reserved[min(later)].kv = rows
        else:
            request.kv = rows
    return checkpoint


def find_heir(waiting: Sequence[tuple[Request, Checkpoint]]) -> Request | None:
    """The best of those who wait, each for a checkpoint of exactly its own tokens."""
    fitting = []
    for request, checkpoint in waiting:
        ends = len(checkpoint.token_ids)
        wanted = dict(zip(request.boundaries, request.keys, strict=True)).get(ends) == checkpoint.key
        if wanted and tuple(request.token_ids[:ends]) == checkpoint.token_ids:  # else the digests collide
            fitting.append(request)
    return min(fitting, key=lambda r: r.rank, default=None)


def hand_over(index: CheckpointIndex, producer: Request, heir: Request) -> list[Checkpoint]:
    """Give the state that ``producer`` has computed, and the checkpoints that both need, to ``heir``.

    Args:
        index: of the checkpoints.
        producer: has its state in its slot, as of the last committed step, and a checkpoint ahead that ``heir`` wants.
        heir: waits, and has computed nothing.

    Returns:
        The checkpoints that ``heir`` computes from now on. Those that only ``producer`` wanted stay with it.
    """
    assert producer.slot is not None
    ahead = producer.reserved[min(producer.reserved)]
    rows, ahead.kv = ahead.kv, None
    index.slots.transfer(producer.slot, producer.request_id, heir.request_id)
    heir.slot, producer.slot = producer.slot, None
    heir.state_in_slot, producer.state_in_slot = True, False
    heir.position = heir.cached_tokens = producer.position
    wanted = dict(zip(heir.boundaries, heir.keys, strict=True))
    for boundary, checkpoint in list(producer.reserved.items()):
        if wanted.get(boundary) == checkpoint.key:
            heir.reserved[boundary] = producer.reserved.pop(boundary)
            checkpoint.producer = heir.request_id
            index.want_kept(checkpoint, heir.retention(boundary))
    taken = list(heir.reserved.values())
    taken += reserve_missing(index, heir)
    # The heir may have a boundary of its own on the way, at which the rows computed so far must end.
    heir.reserved[min(heir.reserved)].kv = rows
    return taken

"""Where a request starts: from which checkpoint, and which ones it computes on its way."""

from __future__ import annotations

from .draft import PlanDraft
from .index import Checkpoint, CheckpointIndex, CheckpointStatus
from .requests import Request


def find_start(index: CheckpointIndex, request: Request, draft: PlanDraft) -> tuple[int, Checkpoint | None] | None:
    """The deepest boundary to start from and its checkpoint; None when it is worth waiting for another request."""
    for boundary, key in zip(reversed(request.boundaries), reversed(request.keys), strict=True):
        checkpoint = index.find(key, request.token_ids[:boundary])
        if checkpoint is None:
            request.reasons[boundary] = index.why_absent(key)
            continue
        ready = checkpoint.status is CheckpointStatus.READY
        if not ready and not draft.completes(checkpoint):
            request.reasons[boundary] = "unready"
            return None
        request.reasons.pop(boundary, None)
        checkpoint.ephemeral &= boundary in request.ephemeral
        return boundary, checkpoint
    return 0, None


def reserve_missing(index: CheckpointIndex, request: Request) -> None:
    """Announce that ``request`` computes the checkpoints after its position that nobody has."""
    for boundary, key in zip(request.boundaries, request.keys, strict=True):
        if boundary > request.position:
            checkpoint = index.reserve(
                key, request.token_ids[:boundary], request.request_id, boundary in request.ephemeral
            )
            if checkpoint is not None:
                request.reserved[boundary] = checkpoint

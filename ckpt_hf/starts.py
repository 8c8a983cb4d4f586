"""Where a request starts: from which checkpoint, or for which one it waits."""

from __future__ import annotations

from typing import NamedTuple

from .draft import STATE_CHUNK_TOKENS, PlanDraft
from .index import Checkpoint, CheckpointIndex, CheckpointStatus
from .prefixes import SEAM_TOKENS
from .reasons import Reason
from .requests import Request


class Start(NamedTuple):
    """Tokens that ``checkpoint`` spares a request, or will spare it once somebody has computed it (``waits``)."""

    position: int
    checkpoint: Checkpoint | None
    waits: bool = False


def find_start(index: CheckpointIndex, request: Request, draft: PlanDraft) -> Start:
    """The deepest place to start from: a boundary of the request, or one that others declared in the same scope.

    A checkpoint that another request is computing is waited for, unless this very step completes it.
    """
    undeclared = _undeclared(index, request)
    for boundary, key in zip(reversed(request.boundaries), reversed(request.keys), strict=True):
        if undeclared is not None and len(undeclared.token_ids) > boundary:
            break
        checkpoint = index.find(key, request.token_ids[:boundary])
        if checkpoint is None or not _usable(request, checkpoint):
            continue
        ready = checkpoint.status is CheckpointStatus.READY
        return Start(boundary, checkpoint, waits=not ready and not draft.completes(checkpoint))
    return Start(len(undeclared.token_ids) if undeclared is not None else 0, undeclared)


def first_stretch(index: CheckpointIndex, request: Request, position: int) -> int:
    """Tokens from ``position`` to the next boundary at which ``request`` would save, or to its end."""
    ahead = zip(request.boundaries, request.keys, strict=True)
    stops = [b for b, key in ahead if b > position and index.get(key) is None]
    return min(stops, default=request.prefill_stop) - position


def explain_misses(index: CheckpointIndex, request: Request, position: int) -> dict[int, Reason]:
    """Why ``request``, which starts at ``position``, reuses nothing behind it: reasons by boundary."""
    reasons = {}
    contents = request.contents or (b"",) * len(request.keys)
    for boundary, key, content in zip(request.boundaries, request.keys, contents, strict=True):
        if boundary > position:
            reasons[boundary] = index.why_absent(key, content, request.scope)
    if request.scope is not None:
        packed = request.packed(request.prompt_tokens)
        common = index.prefixes.overlap(request.scope, packed)
        unseen = Reason.NEVER_SEEN in reasons.values()
        for end in index.prefixes.ends_near(request.scope, packed, common) if unseen else ():
            for boundary in reasons:
                if abs(boundary - end) <= SEAM_TOKENS and reasons[boundary] is Reason.NEVER_SEEN:
                    reasons[boundary] = Reason.SEAM
        if common >= position + STATE_CHUNK_TOKENS and common not in reasons:
            reasons[common] = Reason.NO_BOUNDARY
    return reasons


def _undeclared(index: CheckpointIndex, request: Request) -> Checkpoint | None:
    if request.scope is None or request.media:
        return None  # what placeholders stand for is not in the tokens, so only whole keys can be compared
    checkpoint = index.prefixes.deepest(request.scope, request.packed(request.prefill_stop))
    if checkpoint is not None and not _usable(request, checkpoint):
        checkpoint = index.prefixes.deepest(request.scope, request.packed(request.prefill_stop - 1))
    return checkpoint


def _usable(request: Request, checkpoint: Checkpoint) -> bool:
    """A prompt that ends at the checkpoint needs its logits, which the end of an answer does not have."""
    ends = len(checkpoint.token_ids) == request.prefill_stop and request.decode
    return not ends or checkpoint.logits is not None or checkpoint.status is CheckpointStatus.UNREADY

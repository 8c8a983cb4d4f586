"""What must hold for every plan, whatever has led to it."""

from __future__ import annotations

from ckpt_hf.draft import STATE_CHUNK_TOKENS
from ckpt_hf.plan import StepPlan
from ckpt_ops import Segment, SegmentTable


def check_plan(plan: StepPlan, num_slots: int) -> None:
    """The shape of a plan: what the ops demand, the order that attention relies on, and where pieces may end."""
    pieces = plan.pieces
    SegmentTable.build([Segment(p.length, p.parent, p.source, p.destination) for p in pieces], num_slots, "cpu")
    for piece in pieces:
        assert piece.depth == (0 if piece.parent < 0 else pieces[piece.parent].depth + 1)
        inside = [b for b in piece.request.reserved if piece.start < b < piece.stop]
        assert not inside, "a piece runs over a boundary that its request produces"
        produced = piece.request.reserved.get(piece.stop) if piece.length else None
        assert piece.publishes is produced
        if piece.publishes is None and piece.stop < piece.request.prefill_stop:
            assert (piece.kv_before + piece.length) % STATE_CHUNK_TOKENS == 0, "cut off the grid"
    for depth in {p.depth for p in pieces}:
        prefixes = [p.kv.parent for p in pieces if p.depth == depth]
        changes = [b for a, b in zip([object(), *prefixes], prefixes, strict=False) if a is not b]
        assert len(changes) == len(set(changes)), "pieces with one prefix are apart"
    without = [p.kv.parent is None for p in pieces]
    assert without == sorted(without, reverse=True), "a piece without a prefix behind one that has one"


def check_isolation(plan: StepPlan) -> None:
    """Nobody starts from the states of another caller, model or adapter: keys hold all of that, and so do scopes."""
    for piece in plan.pieces:
        request = piece.request
        start = plan.pieces[piece.parent].publishes if piece.parent >= 0 else request.base
        if start is not None and start.key not in request.keys:
            assert request.scope is not None
            assert start.scope == request.scope

"""A step plan under construction: takes slots and key/value rows, counts the token budget, orders the pieces."""

from __future__ import annotations

from dataclasses import replace

from .admission import Admission
from .checkpoint import Checkpoint
from .kv import KVRows, KVSegment
from .leases import give_up
from .plan import LogitsWanted, Piece, StepPlan
from .requests import Request
from .slots import SlotAllocator

STATE_CHUNK_TOKENS = 64
"""Grid of the chunked recurrence. A piece that the token budget cuts short ends on this grid, counted from its own
boundary, so that the states do not depend on how busy the step was."""


class PlanDraft:
    """Collects the pieces of one step.

    Args:
        slots: source of the rows that hold running states and checkpoints.
        kv_rows: source of the key/value rows.
        budget: tokens that the step may carry.
        admission: tells whether there is room for a checkpoint.
    """

    def __init__(self, slots: SlotAllocator, kv_rows: KVRows, budget: int, admission: Admission) -> None:
        self._slots = slots
        self._kv_rows = kv_rows
        self._admission = admission
        self.budget = budget
        self._pieces: list[Piece] = []
        self._logits: list[LogitsWanted] = []
        self._decodes: list[Request] = []
        self._completed: dict[Checkpoint, int] = {}
        self._closed = False
        self.crowded_out = False
        self.given_up: list[Checkpoint] = []

    @property
    def has_budget(self) -> bool:
        """Whether the step may carry one more prompt token."""
        return self.budget > 0 and not self._closed

    @property
    def only_decodes(self) -> bool:
        """Whether the step has tokens, but none of a prompt."""
        return bool(self._decodes) and not self._pieces

    def can_begin(self, tokens: int) -> bool:
        """Whether a request that has computed nothing behind its boundary, ``tokens`` before the next, gets any."""
        if min(tokens, STATE_CHUNK_TOKENS) <= self.budget:
            return True
        self._run_out()
        return False

    def completes(self, checkpoint: Checkpoint) -> bool:
        """Whether a piece of this step completes ``checkpoint``."""
        return checkpoint in self._completed

    def add_decode(self, request: Request) -> None:
        """The newest token of a running request, beside the pieces of other requests' prompts."""
        self._kv_rows.extend(self._own_kv(request, None), 1)
        self._decodes.append(request)
        self.budget -= 1

    def add_prefill(self, request: Request) -> None:
        """As many prompt tokens of ``request`` as the budget allows, one piece per boundary."""
        base, at = request.base, request.position
        parent = self._completed.get(base, -1) if base is not None else -1
        source = -1
        if parent < 0 and request.state_in_slot:
            source = self._own_slot(request)
        elif parent < 0 and base is not None and base.slot is not None:
            source = base.slot
        before = base.kv if base is not None else None
        while at < request.prefill_stop:
            stop = min((b for b in request.reserved if b > at), default=request.prefill_stop)
            checkpoint = request.reserved.get(stop)
            if checkpoint is not None and stop - at <= self.budget and not self._room_to_save(request, source):
                self.given_up.append(give_up(self._admission.index, request, stop))
                continue
            kv = self._own_kv(request, before) if checkpoint is None else self._checkpoint_kv(checkpoint, before)
            taken = self._take_budget(stop - at, len(kv))
            if at + taken < stop:
                if taken:
                    self._append(request, kv, at, at + taken, source, self._own_slot(request), parent)
                return
            if checkpoint is None:
                piece = self._append(request, kv, at, stop, source, self._own_slot(request), parent)
                self._logits.append(LogitsWanted(request, piece=piece))
                return
            if checkpoint.slot is None:
                checkpoint.slot = self._slots.acquire(checkpoint.key)
            parent = self._append(request, kv, at, stop, source, checkpoint.slot, parent, checkpoint)
            self._completed[checkpoint] = parent
            if source >= 0 and source == request.slot:
                # This step still reads the slot, so nothing in it may write there; the request goes on in another.
                request.retired_slot, request.slot = request.slot, None
                self._admission.took(-1, 0)  # the other slot is set aside until it is needed
            source, before, at, base = -1, checkpoint.kv, stop, checkpoint
        self._end_at_boundary(request, base, parent, source)

    def build(self, step: int) -> StepPlan:
        """The finished plan: pieces by depth, those without a prefix first, those with one prefix side by side."""
        place = {-1: -1}
        prefix_rank: dict[KVSegment | None, int] = {None: -1}
        for piece in self._pieces:
            prefix_rank.setdefault(piece.kv.parent, len(prefix_rank))
        order: list[int] = []
        for depth in range(1 + max((p.depth for p in self._pieces), default=-1)):
            level = [i for i, p in enumerate(self._pieces) if p.depth == depth]
            for i in sorted(level, key=lambda i: prefix_rank[self._pieces[i].kv.parent]):
                place[i] = len(order)
                order.append(i)
        pieces = tuple(
            p if p.parent < 0 else replace(p, parent=place[p.parent]) for p in (self._pieces[i] for i in order)
        )
        logits = tuple(w if w.piece is None else LogitsWanted(w.request, place[w.piece]) for w in self._logits)
        return StepPlan(pieces, logits, tuple(self._decodes), step)

    def _end_at_boundary(self, request: Request, base: Checkpoint | None, parent: int, source: int) -> None:
        """The prompt ends exactly at a checkpoint: copy its state, take its logits."""
        assert base is not None
        if parent >= 0:
            self._logits.append(LogitsWanted(request, piece=parent))
        else:
            self._logits.append(LogitsWanted(request, checkpoint=base))
        if request.decode:
            kv = self._own_kv(request, base.kv)
            self._append(
                request, kv, request.prefill_stop, request.prefill_stop, source, self._own_slot(request), parent
            )

    def _take_budget(self, wanted: int, done: int) -> int:
        """Tokens of ``wanted`` that fit, cut on the state grid when not all do; ``done`` lie behind on that grid."""
        taken = min(wanted, self.budget)
        if taken < wanted:
            taken -= (done + taken) % STATE_CHUNK_TOKENS
            if taken <= 0:
                self._run_out()
                return 0
        self.budget -= taken
        self._admission.took(0, taken)
        return taken

    def _run_out(self) -> None:
        """Nobody else may take what the one whose turn it is cannot use."""
        self.crowded_out = self.only_decodes
        self._closed = True

    def _room_to_save(self, request: Request, source: int) -> bool:
        """Room for a checkpoint, and for the slot in which the request goes on while its last one is still read."""
        return self._admission.room_for(2 if source >= 0 and source == request.slot else 1)

    def _own_slot(self, request: Request) -> int:
        if request.slot is None:
            request.slot = self._slots.acquire(request.request_id)
            self._admission.took(1, 0)
        return request.slot

    def _own_kv(self, request: Request, parent: KVSegment | None) -> KVSegment:
        if request.kv is None:
            request.kv = self._kv_rows.new_segment(parent)
        return request.kv

    def _checkpoint_kv(self, checkpoint: Checkpoint, parent: KVSegment | None) -> KVSegment:
        if checkpoint.kv is None:
            checkpoint.kv = self._kv_rows.new_segment(parent)
        return checkpoint.kv

    def _append(
        self,
        request: Request,
        kv: KVSegment,
        start: int,
        stop: int,
        source: int,
        destination: int,
        parent: int = -1,
        publishes: Checkpoint | None = None,
    ) -> int:
        kv_before = len(kv)
        self._kv_rows.extend(kv, stop - start)
        depth = self._pieces[parent].depth + 1 if parent >= 0 else 0
        self._pieces.append(Piece(request, start, stop, parent, source, destination, kv, kv_before, depth, publishes))
        return len(self._pieces) - 1

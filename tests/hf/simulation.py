"""A stand-in for a model and its pools that remembers what every slot and every key/value row holds.

A state is represented by the tokens that lead to it, so "the state of another prompt", "a state that was never written"
and "a state of the slot's last owner" are all told apart from the right one. Running a plan checks each read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

from ckpt_hf.admission import AdmissionLimits
from ckpt_hf.events import FIELDS, Event, short_key
from ckpt_hf.index import Checkpoint, CheckpointIndex, CheckpointLimits, CheckpointStatus
from ckpt_hf.keys import CONTENT, KeyScope
from ckpt_hf.kv import KVRows, KVSegment
from ckpt_hf.plan import Piece, StepPlan
from ckpt_hf.requests import Request, RequestStatus
from ckpt_hf.scheduler import Scheduler
from ckpt_hf.slots import SlotAllocator

from .histories import Histories
from .plan_checks import check_isolation, check_plan

BYTES_PER_SLOT, BYTES_PER_TOKEN, BYTES_OF_LOGITS = 1000, 10, 100
WAITS = (RequestStatus.WAITING, RequestStatus.DEFERRED)
GARBAGE = -1


def checkpoint_keys(
    token_ids: Sequence[int], boundaries: Sequence[int], identity: bytes, salt: str
) -> tuple[bytes, ...]:
    """Keys of a prompt's boundaries."""
    return KeyScope(identity, salt).keys(token_ids, boundaries)


class _WatchedSlots(SlotAllocator):
    def __init__(self, on_transfer: Callable[[int, Hashable, Hashable], None]) -> None:
        super().__init__()
        self._on_transfer = on_transfer

    def transfer(self, slot: int, owner: Hashable, new_owner: Hashable) -> None:
        super().transfer(slot, owner, new_owner)
        self._on_transfer(slot, owner, new_owner)


class Simulation:
    """Scheduler, index, slots and rows of one model, with simulated contents. The tests call nothing else."""

    def __init__(
        self,
        budget: int = 64,
        slots: int | None = None,
        max_bytes: int | None = None,
        max_running: int | None = None,
        memory_bytes: int | None = None,
        lease_steps: int = 64,
    ) -> None:
        self.slots, self.kv_rows = _WatchedSlots(self._hand_on), KVRows()
        limits = CheckpointLimits(slots, max_bytes, BYTES_PER_SLOT, BYTES_PER_TOKEN, lambda logits: BYTES_OF_LOGITS)
        self.index = CheckpointIndex(self.slots, self.kv_rows, limits)
        admission = AdmissionLimits(max_running, memory_bytes)
        self.events: list[Event] = []
        self.scheduler = Scheduler(
            self.index, self.slots, self.kv_rows, budget, self.events.append, admission, lease_steps
        )
        self.histories = Histories()
        self.states: dict[int, int] = {}
        self.rows: dict[int, int] = {}
        self.computed: Counter[int] = Counter()
        self._slot_owners: dict[int, object] = {}
        self._row_owners: dict[int, KVSegment] = {}
        self._published: set[bytes] = set()
        self._ids = 0

    def request(
        self,
        token_ids: Sequence[int],
        boundaries: Sequence[int] = (),
        ephemeral: Iterable[int] = (),
        decode: bool = True,
        salt: str = "",
        *,
        identity: bytes = b"model",
        scoped: bool = False,
        **fields: Any,
    ) -> Request:
        """A request with an id of its own, not yet added; ``scoped`` ones may start where others declared it."""
        self._ids += 1
        keys = checkpoint_keys(token_ids, boundaries, identity, salt)
        if scoped:
            fields |= {"scope": KeyScope(identity, salt), "contents": CONTENT.keys(token_ids, boundaries)}
        ids = list(token_ids)
        return Request(self._ids, ids, tuple(boundaries), keys, frozenset(ephemeral), decode, **fields)

    def add(self, token_ids: Sequence[int], boundaries: Sequence[int] = (), *args: Any, **fields: Any) -> Request:
        """A request that the scheduler has taken in; arguments of :meth:`request`."""
        request = self.request(token_ids, boundaries, *args, **fields)
        self.scheduler.add(request)
        return request

    def step(
        self, decoding: Iterable[Request] = (), token: int = 7, cancelled: Iterable[Request] = ()
    ) -> StepPlan | None:
        """Plan, run and commit a step in which ``decoding`` requests have got their next token.

        ``cancelled`` ones end between the run and the commit.
        """
        for request in decoding:
            request.token_ids.append(token)
        plan = self.scheduler.plan_step()
        self._forget_freed()
        if plan is not None:
            self._commit(plan, cancelled)
        return plan

    def prefill_step(self) -> StepPlan | None:
        """A step that nobody has a token for; it must bring some request forward."""
        before = self._outstanding()
        plan = self.step()
        if plan is None:
            assert not before
            return None
        assert plan.num_tokens <= self.scheduler.max_batch_tokens
        assert self._outstanding() < before, "a step that brings nobody forward"
        return plan

    def prefill(self) -> list[StepPlan]:
        """Run prefill steps until every prompt has been computed."""
        plans = []
        while (plan := self.prefill_step()) is not None:
            plans.append(plan)
        return plans

    def decode_step(self, requests: Iterable[Request], token: int = 7) -> StepPlan:
        """One more token for each of ``requests``, and whatever else fits."""
        requests = list(requests)
        plan = self.step(requests, token)
        assert plan is not None
        assert set(plan.decodes) == set(requests)
        return plan

    def fail_step(
        self, decoding: Iterable[Request] = (), broken: Collection[int] | None = None, token: int = 7
    ) -> StepPlan | None:
        """A step that fails after it has overwritten what its pieces ``broken`` (None: all) and its decodes write."""
        for request in decoding:
            request.token_ids.append(token)
        plan = self.scheduler.plan_step()
        self._forget_freed()
        if plan is not None:
            self._fail(plan, broken)
        return plan

    def preempt(self, request: Request) -> None:
        """Somebody else needs its memory."""
        self.scheduler.preempt(request)
        self._forget_freed()

    def shrink(self) -> bool:
        """The device ran out of memory."""
        helped = self.scheduler.shrink()
        self._forget_freed()
        return helped

    def cancel(self, request: Request, reason: str = "cancelled") -> None:
        """The caller has lost interest, or has got what it wanted."""
        self.scheduler.finish(request, reason)
        self._forget_freed()

    def finish_all(self) -> None:
        """End every request."""
        for request in self.scheduler.requests:
            self.cancel(request)

    def clear(self) -> None:
        """Drop the checkpoints."""
        self.index.clear()
        self._published.clear()
        self._forget_freed()

    def enforce_limits(self) -> None:
        """Evict what need not stay."""
        self.index.enforce_limits()
        self._forget_freed()

    def compact(self) -> None:
        """Renumber rows, and slots when nothing runs, as the pools' owner does."""
        self.rows = {new: self.rows[old] for new, old in enumerate(self.kv_rows.compact()) if old in self.rows}
        if not self.scheduler.requests:
            moved = self.slots.compact()
            self.states = {new: self.states[old] for old, new in moved.items()}
            for checkpoint in self.index.checkpoints:
                assert checkpoint.slot is not None
                checkpoint.slot = moved[checkpoint.slot]
        self._note_owners()

    def ready(self, token_ids: Sequence[int], salt: str = "") -> Checkpoint | None:
        """The ready checkpoint of exactly these ids."""
        checkpoint = self.index.find(checkpoint_keys(token_ids, [len(token_ids)], b"model", salt)[0], token_ids)
        return checkpoint if checkpoint is not None and checkpoint.status is CheckpointStatus.READY else None

    def _outstanding(self) -> int:
        pending = [r for r in self.scheduler.requests if r.status is not RequestStatus.DECODE]
        return len(pending) + sum(r.prefill_stop - r.position for r in pending)

    def _commit(self, plan: StepPlan, cancelled: Iterable[Request] = ()) -> None:
        self._check_memory()
        check_plan(plan, self.slots.high_water)
        check_isolation(plan)
        finals = self._run(plan.pieces)
        for i, piece in enumerate(plan.pieces):
            if piece.publishes is not None:
                assert i in plan.logits_pieces
                piece.publishes.logits = finals[i]
        for wanted in plan.logits:
            assert wanted.piece is None or wanted.checkpoint is None
            if wanted.piece is not None:
                assert plan.pieces[wanted.piece].length, "logits of a piece without tokens"
                assert wanted.piece in plan.logits_pieces
                logits = finals[wanted.piece]
            else:
                assert wanted.checkpoint is not None
                logits = wanted.checkpoint.logits
            assert logits == self.histories.of(wanted.request)[-1], "the logits of another prefix"
        for request in plan.decodes:
            self._run_decode(request)
        for piece in plan.pieces:
            self.computed.update(self.histories.of(piece.request)[piece.start + 1 : piece.stop + 1])
        for request in cancelled:
            self.cancel(request)
        published = [p.publishes for p in plan.pieces if p.publishes is not None and p.request.in_step == plan.step]
        for checkpoint in published:
            assert checkpoint.key not in self._published, "a prefix was computed twice while others want it"
            self._published.add(checkpoint.key)
        self.scheduler.commit(plan)
        assert all(checkpoint.status is not CheckpointStatus.UNREADY for checkpoint in published)
        self._forget_freed()

    def _run(self, pieces: Sequence[Piece]) -> list[int]:
        """Check every read and write what the pieces compute; no read may depend on the order within the step."""
        finals: list[int] = []
        written: dict[int, int] = {}
        for piece in pieces:
            history = self.histories.of(piece.request)
            start = finals[piece.parent] if piece.parent >= 0 else self.states.get(piece.source, GARBAGE)
            if piece.parent < 0 and piece.source < 0:
                start = 0
            assert start == history[piece.start], "the start state is not that of the tokens before the piece"
            finals.append(history[piece.stop])
            rows = piece.kv.rows[piece.kv_before :]
            assert len(rows) == piece.length
            assert written.keys().isdisjoint(rows), "two pieces write one row"
            written.update(zip(rows, history[piece.start + 1 : piece.stop + 1], strict=True))
        self.rows.update(written)
        for piece in pieces:
            seen = [self.rows.get(row) for segment in piece.kv.path() for row in segment.rows]
            assert seen == self.histories.of(piece.request)[1 : piece.stop + 1], "attention reads other tokens"
        self.states.update({piece.destination: final for piece, final in zip(pieces, finals, strict=True)})
        return finals

    def _run_decode(self, request: Request) -> None:
        """One token in place: state read from and written to the slot, its row the last one."""
        history = self.histories.of(request)
        assert request.slot is not None
        assert request.kv is not None
        assert self.states.get(request.slot) == history[request.position], "a decoding request lost its state"
        self.states[request.slot] = self.rows[request.kv.rows[-1]] = history[request.position + 1]
        seen = [self.rows.get(row) for segment in request.kv.path() for row in segment.rows]
        assert seen == history[1 : request.position + 2], "attention of a decoding request reads other tokens"
        self.computed[history[request.position + 1]] += 1

    def _fail(self, plan: StepPlan, broken: Collection[int] | None) -> None:
        self._forget_freed()
        for i, piece in enumerate(plan.pieces):
            if broken is None or i in broken:
                self.states[piece.destination] = GARBAGE
                self.rows.update(dict.fromkeys(piece.kv.rows[piece.kv_before :], GARBAGE))
        for request in plan.decodes:
            assert request.slot is not None
            assert request.kv is not None
            self.states[request.slot] = self.rows[request.kv.rows[-1]] = GARBAGE
        self.scheduler.rollback(plan)
        self._forget_freed()

    def _forget_freed(self) -> None:
        """What has changed hands is unknown to its new owner, and demand that has ended allows a second computation."""
        self._check_events()
        rows = {row: segment for segment in self.kv_rows.segments for row in segment.rows}
        self.states = {
            slot: held for slot, held in self.states.items() if self.slots.owner(slot) == self._slot_owners.get(slot)
        }
        self.rows = {row: held for row, held in self.rows.items() if rows.get(row) is self._row_owners.get(row)}
        self._published = {key for key in self._published if self.index.demand[key]}
        self._note_owners()

    def _check_events(self) -> None:
        """Every event has its fields; what was given up although somebody wants it may be computed again."""
        evicted = set()
        for event in self.events:
            assert set(FIELDS[event.kind]) <= set(event.data), event
            if event.kind == "evicted":
                evicted.add(event.data["key"])
        self._published = {key for key in self._published if short_key(key) not in evicted}
        self.events.clear()

    def _check_memory(self) -> None:
        limit = self.scheduler.admission.limits.memory_bytes
        assert limit is None or self.scheduler.admission.used <= limit, "more memory than there is"

    def _hand_on(self, slot: int, owner: object, new_owner: object) -> None:
        """A slot changes hands with what it holds."""
        if self._slot_owners.get(slot) == owner:
            self._slot_owners[slot] = new_owner

    def _note_owners(self) -> None:
        self._slot_owners = {slot: self.slots.owner(slot) for slot in range(self.slots.high_water)}
        self._row_owners = {row: segment for segment in self.kv_rows.segments for row in segment.rows}

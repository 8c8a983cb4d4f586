"""Decides which tokens run in the next step, who produces a checkpoint, who starts from one, and who waits.

Rules of one step. A prefill piece ends exactly at the next boundary of its request. A checkpoint that becomes complete
within the step can be continued in the same step; one that will not is waited for. Checkpoints become ready when the
step has committed, and not before. A request holds neither slot nor reservation while it waits, and one that holds
reservations never waits, so no two requests can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .demand import Demand
from .draft import STATE_CHUNK_TOKENS, PlanDraft
from .errors import CheckpointRuntimeError, CheckpointValueError
from .events import Emit, Event, EventKind
from .index import Checkpoint, CheckpointIndex, CheckpointStatus
from .kv import KVRows
from .plan import StepPlan
from .requests import Request, RequestStatus
from .slots import SlotAllocator
from .starts import find_start, reserve_missing


class Scheduler:
    """Pure bookkeeping of requests; it never sees a tensor.

    Args:
        index: checkpoints of this model.
        slots: owners of the state rows.
        kv_rows: owners of the key/value rows.
        max_batch_tokens: tokens of one step.
        emit: hears of everything that happens.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        slots: SlotAllocator,
        kv_rows: KVRows,
        max_batch_tokens: int,
        emit: Emit | None = None,
    ) -> None:
        self.index = index
        self.slots = slots
        self.kv_rows = kv_rows
        self.max_batch_tokens = max(max_batch_tokens, STATE_CHUNK_TOKENS)
        self.demand = Demand(index)
        self.emit = emit
        self.step = 0
        self._requests: dict[int, Request] = {}

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests that have not finished, in order of arrival."""
        return tuple(self._requests.values())

    def add(self, request: Request) -> None:
        """Take a request in.

        Raises:
            CheckpointValueError: the prompt is empty, the id is taken, the request has run before, or a boundary lies
                outside the prompt.
        """
        if request.request_id in self._requests:
            raise CheckpointValueError(f"request_id {request.request_id} is already scheduled")
        request.check_new()
        self._requests[request.request_id] = request
        self.demand.take_all(request)
        self._tell(
            "submitted",
            request,
            prompt_tokens=request.prompt_tokens,
            boundaries=list(request.boundaries),
            priority=request.priority,
        )

    def plan_step(self) -> StepPlan | None:
        """The next step: a token for each request that has its next one, then prompt tokens as far as the budget goes.

        Give a request its sampled token (append it to ``token_ids``) before the next call.

        Returns:
            None when there is nothing to do until a token, a request or a :meth:`finish` arrives.
        """
        draft = PlanDraft(self.slots, self.kv_rows, self.max_batch_tokens)
        for request in self._requests.values():
            if request.has_next_token and draft.has_budget:
                draft.add_decode_row(request)
        for request in self._requests.values():
            if request.status is not RequestStatus.DECODE:
                self._schedule_prefill(request, draft)
        plan = draft.build(decode=False)
        return plan if plan.pieces or plan.logits or plan.decodes else None

    def plan_prefill(self) -> StepPlan | None:
        """The next step of prompt tokens, or None when every prompt has been computed."""
        pending = [r for r in self._requests.values() if r.status is not RequestStatus.DECODE]
        if not pending:
            return None
        draft = PlanDraft(self.slots, self.kv_rows, self.max_batch_tokens)
        for request in pending:
            self._schedule_prefill(request, draft)
        plan = draft.build(decode=False)
        if not plan.pieces and not plan.logits:
            raise CheckpointRuntimeError(
                f"no progress: {len(pending)} requests wait for checkpoints that nobody computes"
            )
        return plan

    def plan_decode(self, request_ids: Iterable[int]) -> StepPlan:
        """One token for each of the given requests, all of which must have been prefilled."""
        draft = PlanDraft(self.slots, self.kv_rows, self.max_batch_tokens)
        requests = {request_id: self._requests[request_id] for request_id in request_ids}
        for request in requests.values():
            if request.status is not RequestStatus.DECODE or request.position != len(request.token_ids) - 1:
                raise CheckpointRuntimeError(
                    f"request {request.request_id} is {request.status.value} at position {request.position} of "
                    f"{len(request.token_ids)} tokens; a decode step takes decoding requests with one new token"
                )
            draft.add_decode(request)
        return draft.build(decode=True)

    def commit(self, plan: StepPlan) -> None:
        """The step ran: advance its requests and publish what it wrote."""
        for piece in plan.pieces:
            request = piece.request
            request.position = piece.stop
            request.computed_tokens += piece.length
            if piece.publishes is not None:
                self.index.publish(piece.publishes)
                request.reserved.pop(piece.stop, None)
                self._release_retired(request)
            if piece.destination == request.slot:
                request.state_in_slot = True
                self._lease(request, None)
            elif piece.publishes is not None:
                request.state_in_slot = False
                self._lease(request, piece.publishes)
        for request in plan.decodes:
            request.position += 1
        for piece in plan.pieces:
            self.demand.settle(piece.request)
        for wanted in plan.logits:
            request = wanted.request
            if request.status is not RequestStatus.PREFILL:
                continue
            if request.decode:
                request.move(RequestStatus.DECODE)
            else:
                self.finish(request)
        if not plan.decode:
            self.index.enforce_limits()

    def rollback(self, plan: StepPlan) -> None:
        """The step failed: nothing that it wrote may be read. Its prompts wait again, their checkpoints are absent.

        Requests that were decoding end: a decode step advances their states in place, so there is no way back.
        """
        requests = {piece.request for piece in plan.pieces} | {w.request for w in plan.logits}
        for request in requests:
            if request.status is RequestStatus.PREFILL:
                self._restart(request)
            elif request.status is RequestStatus.DECODE:
                self.finish(request, "failed")
        for request in plan.decodes:
            self._restart(request)  # its state may be half written

    def preempt(self, request: Request) -> None:
        """Take slot and rows from a running request: it waits, and computes again from its nearest checkpoint on.

        What it has generated so far counts as a part of its prompt from then on.
        """
        self._tell("preempted", request, position=request.position)
        self._restart(request)

    def finish(self, request: Request, reason: str = "cancelled") -> None:
        """End a request in whatever state it is and free all that it holds. Its unready checkpoints become absent."""
        if request.status is RequestStatus.FINISHED:
            return
        request.move(RequestStatus.FINISHED)
        request.finish_reason = reason
        self._tell("finished", request, reason=reason)
        if self._requests.get(request.request_id) is request:  # not one that ``add`` refused
            del self._requests[request.request_id]
        self._lease(request, None)
        self._free(request)
        self.demand.give_up(request, request.demanded)
        self.index.enforce_limits()

    def _tell(self, kind: EventKind, request: Request | None, **data: Any) -> None:
        if self.emit is not None:
            self.emit(Event(kind, self.step, request.request_id if request is not None else None, data))

    def _restart(self, request: Request) -> None:
        self._lease(request, None)
        self._free(request)
        request.move(RequestStatus.WAITING)
        request.position = request.cached_tokens = 0
        request.prefill_stop = len(request.token_ids)
        self.demand.take_all(request)

    def _free(self, request: Request) -> None:
        for checkpoint in request.reserved.values():
            if checkpoint.status is not CheckpointStatus.UNREADY:
                continue
            # Requests that were to start from it in a step that never ran, with or without a piece in that step.
            for holder in [r for r in self.requests if r.base is checkpoint]:
                self._restart(holder)
            self.index.drop(checkpoint)
        request.reserved.clear()
        if request.kv is not None:
            self.kv_rows.release(request.kv)
            request.kv = None
        if request.slot is not None:
            self.slots.release(request.slot, request.request_id)
            request.slot = None
        self._release_retired(request)
        request.state_in_slot = False

    def _release_retired(self, request: Request) -> None:
        if request.retired_slot is not None:
            self.slots.release(request.retired_slot, request.request_id)
            request.retired_slot = None

    def _schedule_prefill(self, request: Request, draft: PlanDraft) -> None:
        if request.status in (RequestStatus.WAITING, RequestStatus.DEFERRED):
            if not draft.has_budget:
                return
            found = find_start(self.index, request, draft)
            if found is None:
                if request.status is RequestStatus.WAITING:
                    request.move(RequestStatus.DEFERRED)
                return
            request.move(RequestStatus.PREFILL)
            position, checkpoint = found
            request.position = request.cached_tokens = position
            if checkpoint is not None:
                self.index.touch(checkpoint)
                self._lease(request, checkpoint)
            reserve_missing(self.index, request)
        draft.add_prefill(request)

    def _lease(self, request: Request, checkpoint: Checkpoint | None) -> None:
        """Hold the checkpoint that the request's next piece starts from; None lets go of the last one."""
        if checkpoint is not None:
            checkpoint.leases += 1
        if request.base is not None:
            request.base.leases -= 1
        request.base = checkpoint

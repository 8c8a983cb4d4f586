"""Decides which tokens run in the next step, who produces a checkpoint, who starts from one, and who waits.

Rules of one step. Requests that decode get their token first. A prefill piece ends exactly at the next boundary of its
request. A checkpoint that becomes complete within the step can be continued in it; one that will not is waited for.
Checkpoints become ready when the step has committed, and not before. A request holds neither slot nor reservation while
it waits, and one that holds reservations never waits, so no two requests can wait for each other.
"""

from __future__ import annotations

from .admission import Admission, AdmissionLimits
from .draft import STATE_CHUNK_TOKENS, PlanDraft
from .errors import CheckpointRuntimeError, CheckpointValueError
from .events import Emit
from .holdings import advance
from .index import CheckpointIndex
from .kv import KVRows
from .lifecycle import Lifecycle
from .plan import StepPlan
from .requests import Request, RequestStatus
from .slots import SlotAllocator
from .starts import explain_misses, find_start, first_stretch


class Scheduler(Lifecycle):
    """Pure bookkeeping of requests; it never sees a tensor.

    Args:
        index: checkpoints of this model.
        slots: owners of the state rows.
        kv_rows: owners of the key/value rows.
        max_batch_tokens: tokens of one step.
        emit: hears of everything that happens.
        limits: what may run at once.
        lease_steps: steps without progress after which somebody who waits takes a checkpoint over.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        slots: SlotAllocator,
        kv_rows: KVRows,
        max_batch_tokens: int,
        emit: Emit | None = None,
        limits: AdmissionLimits | None = None,
        lease_steps: int = 64,
    ) -> None:
        super().__init__(index, emit)
        self.slots = slots
        self.kv_rows = kv_rows
        self.max_batch_tokens = max(max_batch_tokens, STATE_CHUNK_TOKENS)
        self.admission = Admission(index, limits or AdmissionLimits())
        self.lease_steps = lease_steps
        self._crowded_out = False

    def add(self, request: Request) -> None:
        """Take a request in.

        Raises:
            CheckpointValueError: the prompt is empty, the id is taken, the request has run before, a boundary lies
                outside the prompt, or the prompt needs more memory than there is.
        """
        if request.request_id in self._requests:
            raise CheckpointValueError(f"request_id {request.request_id} is already scheduled")
        request.check_new()
        limit, needed = self.admission.limits.memory_bytes, self.admission.alone(request)
        if limit is not None and needed > limit:
            raise CheckpointValueError(
                f"token_ids of request {request.request_id} take {needed} bytes of memory; {limit} are allowed"
            )
        self.enter(request, self.max_batch_tokens)

    def plan_step(self) -> StepPlan | None:
        """The next step: a token for each request that has its next one, then prompt tokens as far as the budget goes.

        Give a request its sampled token (append it to ``token_ids``) before the next call, and commit or roll back each
        plan before the next one.

        Returns:
            None when there is nothing to do until a token, a request or a :meth:`finish` arrives.
        """
        if self._outstanding is not None:
            raise CheckpointRuntimeError(f"step {self._outstanding.step} has neither been committed nor rolled back")
        self.expire_leases(self.lease_steps)
        self.admission.begin(self._running.values())
        draft = PlanDraft(self.slots, self.kv_rows, self.max_batch_tokens, self.admission)
        # A prompt that found less than a chunk left has its turn before the last of those that decode.
        kept_back = STATE_CHUNK_TOKENS if self._crowded_out else 0
        others = self._add_decodes(draft, self._decodes_with_room(), kept_back)
        self._add_prefill(draft)
        self._add_decodes(draft, others)
        plan = draft.build(self.step)
        if plan.pieces or plan.logits or plan.decodes:
            return self._hand_out(plan)
        if len(self.waiting) and not self._running:
            raise CheckpointRuntimeError(f"{len(self.waiting)} requests wait for checkpoints that nobody computes")
        return None

    def commit(self, plan: StepPlan) -> None:
        """The step ran: advance its requests and publish what it wrote. Those that ended meanwhile are left alone."""
        self._outstanding = None
        mine = [p for p in plan.pieces if p.request.in_step == plan.step]
        for piece in mine:
            advance(self.index, piece.request, piece.stop, piece.destination, piece.publishes)
            piece.request.stalled_since = self.step
            if piece.publishes is not None:
                self.published(piece.request, piece.publishes)
        for request in plan.decodes:
            if request.in_step == plan.step:
                request.in_step = None
                request.position += 1
        for piece in mine:
            piece.request.in_step = None
            self.demand.settle(piece.request)
        for request in [w.request for w in plan.logits]:
            request.in_step = None
            if request.status is RequestStatus.PREFILL:
                self.answer(request)
        self.index.enforce_limits()
        self.end_step(plan.num_tokens)

    def rollback(self, plan: StepPlan) -> None:
        """The step failed: nothing that it wrote may be read. Its requests wait again, their checkpoints are absent."""
        self._outstanding = None
        requests = [p.request for p in plan.pieces] + [w.request for w in plan.logits] + list(plan.decodes)
        for request in requests:
            if request.in_step == plan.step:
                self.restart(request)
        self.end_step(0)

    def shrink(self) -> bool:
        """Memory was short outside of what is counted here: give up a checkpoint or a running request's place.

        Returns:
            Whether there was anything to give up without ending a request.
        """
        if self.index.evict_one() or self.index.evict_one(wanted_too=True):
            return True
        if len(self._running) < 2:
            return False
        self.preempt(self._victim())
        return True

    def _hand_out(self, plan: StepPlan) -> StepPlan:
        for request in (*(p.request for p in plan.pieces), *(w.request for w in plan.logits), *plan.decodes):
            request.in_step = plan.step
        self._outstanding = plan
        self.tell_plan(plan)
        return plan

    def _add_decodes(self, draft: PlanDraft, ready: list[Request], kept_back: int = 0) -> list[Request]:
        """Next tokens, but for ``kept_back`` tokens of the budget. Returns the others, who come first next time."""
        places = max(draft.budget - kept_back, 0)
        for request in ready[:places]:
            draft.add_decode(request)
            if len(ready) > places:
                self._running[request.request_id] = self._running.pop(request.request_id)
        return ready[places:]

    def _decodes_with_room(self) -> list[Request]:
        """Requests with a next token, after preempting as many as it takes to have a row for each."""
        while True:
            ready = [r for r in self._running.values() if r.has_next_token]
            if not ready or self.admission.room_for(0, len(ready)):
                return ready
            victim = self._victim()
            if len(self._running) > 1:
                self.preempt(victim)
            elif self.admission.room_for(0, 1, desperate=True):
                return ready
            else:
                self.fail(victim, "out of memory")
            self.admission.begin(self._running.values())

    def _victim(self) -> Request:
        return min(self._running.values(), key=lambda r: (r.priority, -r.rank[-1]))

    def _add_prefill(self, draft: PlanDraft) -> None:
        under_way = sorted(
            (r for r in self._running.values() if r.status is RequestStatus.PREFILL),
            key=lambda r: (r.rank, r.request_id),
            reverse=True,
        )
        admitting = True
        while draft.has_budget:
            admitting = admitting and not self.admission.full(len(self._running))
            waiting = self.waiting.first() if admitting else None
            if under_way and (waiting is None or under_way[-1].rank <= waiting.rank):
                self._prefill(under_way.pop(), draft)
            elif waiting is not None:
                admitting = self._start(waiting, draft)
            else:
                break
        left_out = draft.budget == 0 and draft.only_decodes and (under_way or self.waiting.first() is not None)
        self._crowded_out = draft.crowded_out or bool(left_out)

    def _start(self, request: Request, draft: PlanDraft) -> bool:
        """Start a waiting request, or let it wait for somebody; False when nobody else can be let in."""
        start = find_start(self.index, request, draft)
        if start.checkpoint is not None and start.waits:
            self.wait_for(request, start.checkpoint)
            return True
        if not draft.can_begin(first_stretch(self.index, request, start.position)):
            return True
        alone = not self._running
        self.hold(request, start.checkpoint)
        if not self.admission.admit(request, start.position, len(self._running), desperate=alone):
            self.hold(request, None)
            if alone:
                self.fail(request, "out of memory")
            return alone
        reasons = explain_misses(self.index, request, start.position)
        self.begin(request, start.position, start.checkpoint, reasons)
        self._prefill(request, draft)
        return True

    def _prefill(self, request: Request, draft: PlanDraft) -> None:
        draft.add_prefill(request)
        for checkpoint in draft.given_up:
            self.dropped(checkpoint)
        draft.given_up.clear()
        for checkpoint in request.reserved.values():
            self.leased(checkpoint, draft.completes(checkpoint))

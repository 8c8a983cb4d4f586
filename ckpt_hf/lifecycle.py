"""The life of a request between its moves: who waits for what, who runs, who computes what for whom."""

from __future__ import annotations

from collections.abc import Mapping

from .checkpoint import Checkpoint, CheckpointStatus
from .deferral import Deferral
from .demand import Demand
from .errors import CheckpointRuntimeError
from .events import Emit, short_key
from .holdings import can_hand_over, keep_answer, release_all, set_base, unready
from .index import CheckpointIndex
from .leases import find_heir, hand_over, reserve_missing
from .plan import StepPlan
from .priorities import Ranking
from .reasons import Reason, for_caller
from .requests import Request, RequestStatus


class Lifecycle(Deferral):
    """Requests from arrival to end. A request either waits, and holds nothing, or runs.

    Args:
        index: checkpoints of this model.
        emit: hears of everything that happens.

    Attributes:
        ended: requests that were ended here for lack of memory; for whoever runs the steps to read and clear.
    """

    def __init__(self, index: CheckpointIndex, emit: Emit | None) -> None:
        super().__init__(index, emit)
        self.demand = Demand(index)
        self.ended: list[Request] = []
        self._ranking = Ranking()
        self._running: dict[int, Request] = {}
        self._outstanding: StepPlan | None = None
        index.on_evict = lambda checkpoint: self.tell_of("evicted", None, checkpoint)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests that have not finished, in order of arrival."""
        return tuple(self._requests.values())

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that have started and not finished."""
        return tuple(self._running.values())

    def enter(self, request: Request, batch_tokens: int) -> None:
        """A checked request arrives."""
        self._requests[request.request_id] = request
        self._ranking.enter(request, self.step, batch_tokens)
        self.demand.take_all(request)
        self.tell_submitted(request)
        self.queue(request)

    def preempt(self, request: Request) -> None:
        """Take slot and rows from a running request: it waits, and computes again from its nearest checkpoint on.

        What it has generated so far counts as a part of its prompt from then on.

        Raises:
            CheckpointRuntimeError: the request does not run.
        """
        if request.request_id not in self._running:
            raise CheckpointRuntimeError(
                f"request {request.request_id} is {request.status.value}; only a running request can be preempted"
            )
        self.tell("preempted", request, position=request.position)
        self.restart(request)

    def finish(self, request: Request, reason: str = "cancelled") -> None:
        """End a request in whatever state it is and free all that it holds.

        The checkpoints that it was computing become absent, and one of those who wait for them takes over from the last
        committed step. With ``keep_answer`` and a reason of ``eos``, ``stop`` or ``length`` its end is kept; what it
        has pinned stays pinned, for whoever asked, if the reason is ``computed``.
        """
        if request.status is RequestStatus.FINISHED:
            return
        known = self._requests.get(request.request_id) is request  # not one that ``add`` refused
        if known:
            self._hand_over(request)
            if (kept := keep_answer(self.index, request, reason)) is not None:
                self.tell_of("published", request, kept)
                self.waiting.open(kept.key)
        request.move(RequestStatus.FINISHED)
        request.finish_reason = reason
        request.in_step = None
        if known:
            del self._requests[request.request_id]
            self._running.pop(request.request_id, None)
            if request in self.waiting:
                self.waiting.remove(request)
            self._ranking.leave(request)
            returning: list[Request] = []
            self._free(request, returning)
            for one in returning:
                self.queue(one)
            self.demand.give_up(request, request.demanded)
            if reason != "computed":
                self._unpin_all(request)
            self.tell("finished", request, reason=reason, generated=len(request.token_ids) - request.prompt_tokens)
            self.index.enforce_limits()

    def fail(self, request: Request, reason: str) -> None:
        """End a request from within; it is listed in ``ended``."""
        self.tell("failed", request, error=reason)
        self.finish(request, reason)
        self.ended.append(request)

    def restart(self, request: Request) -> None:
        """A running request waits again, with nothing; what it has generated will be computed like a prompt."""
        returning: list[Request] = []
        self._withdraw(request, returning)
        for one in returning:
            self.queue(one)

    def hold(self, request: Request, checkpoint: Checkpoint | None) -> None:
        """Protect what ``request`` is about to start from."""
        set_base(self.index, request, checkpoint)

    def begin(
        self, request: Request, position: int, checkpoint: Checkpoint | None, reasons: Mapping[int, Reason]
    ) -> None:
        """A waiting request starts at ``position``, from the checkpoint that it holds."""
        self._run(request)
        request.position = position
        if len(request.token_ids) == request.prompt_tokens:
            request.cached_tokens = position
            request.reasons = {boundary: for_caller(reason) for boundary, reason in reasons.items()}
        if checkpoint is not None:
            if position in request.boundaries:
                self.index.want_kept(checkpoint, request.retention(position))
            self.index.touch(checkpoint)
            if checkpoint.status is CheckpointStatus.READY:
                self._pin_if_asked(request, position, checkpoint)
        for boundary, reason in reasons.items():
            self.tell("missed", request, position=boundary, reason=str(reason))
        extra = {} if checkpoint is None else {"key": short_key(checkpoint.key)}
        self.tell("started", request, position=position, cached=position, **extra)
        for taken in reserve_missing(self.index, request):
            self.tell_of("reserved", request, taken)

    def published(self, request: Request, checkpoint: Checkpoint) -> None:
        """``checkpoint`` is ready: all who wait for it wake at once."""
        self.tell_of("published", request, checkpoint)
        self._pin_if_asked(request, len(checkpoint.token_ids), checkpoint)
        self.waiting.open(checkpoint.key)

    def answer(self, request: Request) -> None:
        """The prompt of ``request`` has been computed."""
        if request.scope is not None and not request.media:
            self.index.prefixes.remember(request.scope, request.packed(request.prompt_tokens))
        if request.decode:
            request.move(RequestStatus.DECODE)
        else:
            self.finish(request, "computed")

    def expire_leases(self, steps: int) -> None:
        """Take checkpoints from those who have made no progress for ``steps`` steps while others wait for them."""
        for request in self.running:
            if request.status is RequestStatus.PREFILL and self.step - request.stalled_since > steps:
                request.stalled_since = self.step
                if any(self.waiting.group(c.key) is not None for c in unready(request)):
                    self._hand_over(request)
                    self.preempt(request)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep a ready checkpoint until :meth:`unpin`; see :meth:`CheckpointIndex.pin`."""
        self.index.pin(checkpoint)
        self.tell_of("pinned", None, checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Undo one :meth:`pin`."""
        self.index.unpin(checkpoint)
        self.tell_of("unpinned", None, checkpoint)

    def end_step(self, tokens: int) -> None:
        """A step that computed ``tokens`` is over."""
        self.tell_end(tokens, self.index.slots.used, self.index.kv_rows.used, self.index.limits)
        self.step += 1

    def _run(self, request: Request) -> None:
        self.waiting.remove(request)
        self._ranking.leave(request)
        request.move(RequestStatus.PREFILL)
        request.stalled_since = self.step
        self._running[request.request_id] = request

    def _hand_over(self, request: Request) -> None:
        """Let the best of those who wait for ``request`` go on from its last committed step."""
        if not can_hand_over(request):
            return
        waiting = [(g.head(), c) for c in unready(request) if (g := self.waiting.group(c.key)) is not None]
        heir = find_heir([(one, checkpoint) for one, checkpoint in waiting if one is not None])
        if heir is None:
            return
        self._run(heir)
        for taken in hand_over(self.index, request, heir):
            self.tell_of("reserved", heir, taken)
            self.leased(taken, completes=False)
        heir.reasons.clear()
        self.tell("started", heir, position=heir.position, cached=heir.position)

    def _pin_if_asked(self, request: Request, boundary: int, checkpoint: Checkpoint) -> None:
        if boundary in request.pins and boundary not in request.pinned:
            try:
                self.pin(checkpoint)
                request.pinned[boundary] = checkpoint
            except CheckpointRuntimeError:  # the limits have no room: whoever asked sees that the pin is gone
                request.pins -= {boundary}

    def _unpin_all(self, request: Request) -> None:
        for checkpoint in request.pinned.values():
            if self.index.get(checkpoint.key) is checkpoint:
                self.unpin(checkpoint)
        request.pinned.clear()

    def _withdraw(self, request: Request, returning: list[Request]) -> None:
        """Take all that a running request holds; it is to be filed again once everything has been given back."""
        self._running.pop(request.request_id, None)
        self._free(request, returning)
        request.move(RequestStatus.WAITING)
        request.position, request.in_step = 0, None
        request.prefill_stop = len(request.token_ids)
        self.demand.take_all(request)
        returning.append(request)

    def _free(self, request: Request, returning: list[Request]) -> None:
        """Give back all that ``request`` holds. Who was to start in this step from what it computes starts again."""
        for checkpoint in unready(request):
            for holder in [r for r in self.running if r.base is checkpoint and r is not request]:
                self._withdraw(holder, returning)
            if request.base is checkpoint:
                set_base(self.index, request, None)
            self.index.drop(checkpoint)
            self.dropped(checkpoint)
        request.reserved.clear()
        release_all(self.index, request)

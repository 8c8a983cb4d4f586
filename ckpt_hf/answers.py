"""An engine's requests in flight: their next tokens are chosen here and handed to their handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .errors import CheckpointRuntimeError
from .handles import Handle
from .outputs import HandleStatus
from .pins import Pin
from .request_sampling import TokenChooser, choose_tokens
from .requests import Request
from .runner import ModelRunner
from .stats import report_row
from .submissions import Submission

_STAND_IN = -1
"""Stands for a token that has been chosen and not been read yet, so that the next step can be planned."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    submission: Submission
    chooser: TokenChooser | None


class Answers:
    """The sink of an engine's requests (a :class:`~ckpt_hf.sinks.LogitsSink`). Hold the runner's lock round all calls.

    Args:
        runner: of the model.
        meanwhile: work that needs no result of the step, done while the device computes it.
    """

    lockstep = False

    def __init__(self, runner: ModelRunner, meanwhile: Callable[[], object]) -> None:
        self._runner = runner
        self._meanwhile = meanwhile
        self._entries: dict[Request, _Entry] = {}
        self._by_handle: dict[Handle, Request] = {}
        self._pins: dict[Handle, Pin] = {}
        self._ending: dict[Request, str] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._ending)

    def add(self, submission: Submission, identity: bytes) -> None:
        """Hand a request to the scheduler; one that it refuses fails."""
        handle = submission.handle
        try:
            request = self._request(submission, identity)
            self._entries[request] = _Entry(submission, self._chooser(submission))
            self._by_handle[handle] = request
            handle.move(HandleStatus.PREFILLING)
            self._runner.add(request, self)
        except Exception as error:
            handle.end(HandleStatus.FAILED, "failed", None, error)
            if (refused := self._by_handle.pop(handle, None)) is not None:
                del self._entries[refused]

    def cancel(self, handle: Handle) -> None:
        """End the handle's request, if it has not ended, and let go of a pin that nobody has taken."""
        request = self._by_handle.get(handle)
        if request is not None:
            self._runner.end(request, "cancelled")
            self._finish(request, HandleStatus.CANCELLED, "cancelled")
        if (pin := self._pins.pop(handle, None)) is not None:
            pin.release()
        handle.end(HandleStatus.CANCELLED, "cancelled")

    def end_all(self, reason: str, error: BaseException) -> None:
        """End every request with ``error``."""
        for request in list(self._entries):
            self._runner.end(request, reason)
            self._finish(request, HandleStatus.FAILED, reason, error)
        while self._ending:
            self._runner.end(*self._ending.popitem())

    def lose_all(self, error: BaseException) -> None:
        """Whatever the requests ran on is gone."""
        self._runner.lose([*self._entries, *self._ending], error)

    def take_pin(self, handle: Handle) -> Pin:
        """What a finished submission without settings has pinned, once."""
        return self._pins.pop(handle)

    def receive(self, logits: dict[Request, Tensor]) -> None:
        """Choose and hand out the next token of each request."""
        self.settle()
        answering = [
            (request, entry.submission.handle, entry.chooser)
            for request in logits
            if (entry := self._entries.get(request)) is not None and entry.chooser is not None
        ]
        choice = choose_tokens([chooser for _, _, chooser in answering], [logits[r] for r, _, _ in answering])
        for row in choice.rows:
            request, _, chooser = answering[row]
            if chooser.may_go_on(len(request.token_ids) + 1):
                request.token_ids.append(_STAND_IN)
        self._meanwhile()
        tokens, stops = choice.read()
        for row, (request, handle, chooser) in enumerate(answering):
            if row in tokens:
                self._deliver(request, handle, tokens[row], chooser, stops.get(row, False))
            else:
                self._runner.end(request, "failed")
                self._finish(request, HandleStatus.FAILED, "failed", choice.errors[row])
        for request in logits:
            if request.finish_reason == "computed":
                self._keep_pin(request)

    def lose(self, requests: Sequence[Request], error: BaseException) -> None:
        """A step failed that these requests were in."""
        for request in requests:
            self._ending.pop(request, None)
            self._unpin(request)
            self._finish(request, HandleStatus.FAILED, "failed", error)

    def settle(self) -> None:
        """End the requests whose answers are complete, now that no step reads or writes what they own."""
        for request in [request for request in self._ending if request.in_step is None]:
            self._runner.end(request, self._ending.pop(request))

    def _deliver(self, request: Request, handle: Handle, token: int, chooser: TokenChooser, stops: bool) -> None:
        stands_in = request.token_ids[-1] == _STAND_IN
        if stands_in:
            request.token_ids[-1] = token
        handle.move(HandleStatus.DECODING)
        handle.push(token)
        reason = chooser.ends(token, len(request.token_ids) + (not stands_in)) or ("stop" if stops else None)
        if reason is None:
            return
        if request.in_step is None:
            self._runner.end(request, reason)
        else:
            self._ending[request] = reason
        self._finish(request, HandleStatus.FINISHED, reason)

    def _keep_pin(self, request: Request) -> None:
        checkpoint = request.pinned.get(request.prompt_tokens)
        entry = self._entries.get(request)
        if entry is not None and checkpoint is not None:
            self._pins[entry.submission.handle] = Pin(self._runner, checkpoint)
            self._finish(request, HandleStatus.FINISHED, "computed")
        else:
            self._unpin(request)
            error = CheckpointRuntimeError("the cache's limits have no room for this prefix beside what is pinned")
            self._finish(request, HandleStatus.FAILED, "failed", error)

    def _unpin(self, request: Request) -> None:
        for checkpoint in request.pinned.values():
            Pin(self._runner, checkpoint).release()
        request.pinned.clear()

    def _finish(self, request: Request, status: HandleStatus, reason: str, cause: BaseException | None = None) -> None:
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        handle = entry.submission.handle
        self._by_handle.pop(handle, None)
        report = report_row(request, entry.submission.prompt.notes)
        self._runner.stats.count([report], len(handle.output.generated_tokens))
        handle.end(status, reason, report, cause)

    def _request(self, submission: Submission, identity: bytes) -> Request:
        """The prompt's end becomes a boundary where it is to be kept."""
        prompt, ends = submission.prompt, len(submission.prompt.token_ids)
        boundaries, soft = prompt.boundaries, frozenset[int]()
        if submission.keep_prompt and ends not in boundaries:
            boundaries, soft = (*boundaries, ends), frozenset({ends})
        return self._runner.new_request(
            prompt.token_ids,
            boundaries,
            identity,
            submission.salt,
            priority=submission.priority,
            soft=soft,
            keep_answer=submission.keep_answer,
            decode=submission.settings is not None,
            pins=frozenset({ends}) if submission.settings is None else frozenset(),
        )

    def _chooser(self, submission: Submission) -> TokenChooser | None:
        if submission.settings is None:
            return None
        ids = submission.prompt.token_ids
        return TokenChooser(submission.settings, ids, submission.seed, self._runner.model.device)

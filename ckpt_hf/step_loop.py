"""The engine's thread: takes submissions in, runs steps, chooses tokens, hands them to the handles."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointRuntimeError
from .handles import Handle
from .outputs import HandleStatus
from .request_sampling import Choice, TokenChooser, choose_tokens
from .requests import Request
from .runner import ModelRunner
from .stats import report_row
from .steps import run_step
from .submissions import Submission

_ADMITTED_A_STEP = 256
"""Submissions taken in before a step; hashing the prompts of thousands at once would hold up those that decode."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    submission: Submission
    chooser: TokenChooser

    @property
    def handle(self) -> Handle:
        return self.submission.handle


class StepLoop:
    """The sink of an engine's requests, and the thread that runs them.

    Args:
        runner: of the model; its lock is held round each step only.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._wake = threading.Condition()
        self._inbox: deque[Submission] = deque()
        self._cancelled: deque[Handle] = deque()
        self._entries: dict[Request, _Entry] = {}
        self._by_handle: dict[Handle, Request] = {}
        self._closed: BaseException | None = None
        self._draining = False
        self._notified = False
        self._thread = threading.Thread(target=self._run, name="ckpt_hf engine", daemon=True)

    @property
    def error(self) -> BaseException | None:
        """Why no more requests are served, or None."""
        return self._closed

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, submission: Submission) -> None:
        """Take a request in, from any thread.

        Raises:
            CheckpointRuntimeError: the loop has been closed or has failed.
        """
        with self._wake:
            if self._closed is not None or self._draining:
                raise CheckpointRuntimeError(f"the engine takes no more requests: {self._closed or 'it is closing'}")
            self._inbox.append(submission)
            self._notify()

    def cancel(self, handle: Handle) -> None:
        """End a request before the next step, from any thread."""
        with self._wake:
            self._cancelled.append(handle)
            self._notify()

    def poke(self) -> None:
        """Something that a waiting request waits for may have changed."""
        with self._wake:
            self._notify()

    def close(self, drain: bool) -> None:
        """End the thread: once all requests have ended with ``drain``, else at once, each with an error."""
        with self._wake:
            self._draining = True
            if not drain and self._closed is None:
                self._closed = CheckpointRuntimeError("the engine was closed before the request had ended")
            self._notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def receive(self, logits: dict[Request, Tensor]) -> None:
        """Choose and hand out the next token of each request (a :class:`~ckpt_hf.sinks.LogitsSink`)."""
        requests = [request for request in logits if request in self._entries]
        entries = [self._entries[request] for request in requests]
        choice = choose_tokens([entry.chooser for entry in entries], [logits[request] for request in requests])
        tokens, stops = choice.read()
        for row, (request, entry) in enumerate(zip(requests, entries, strict=True)):
            if row in tokens:
                self._deliver(request, entry, tokens[row], stops.get(row, False))
            else:
                self._fail_alone(request, choice, row)

    def lose(self, requests: Sequence[Request], error: BaseException) -> None:
        """A step failed that these requests were in."""
        for request in requests:
            self._finish(request, HandleStatus.FAILED, "failed", error)

    def _deliver(self, request: Request, entry: _Entry, token: int, stops: bool) -> None:
        length = len(request.token_ids) + 1
        entry.handle._move(HandleStatus.DECODING)
        entry.handle._push(token)
        reason = entry.chooser.ends(token, length) or ("stop" if stops else None)
        if reason is None:
            self._runner.feed(request, token)
            return
        self._runner.end(request, reason)
        self._finish(request, HandleStatus.FINISHED, reason)

    def _fail_alone(self, request: Request, choice: Choice, row: int) -> None:
        self._runner.end(request, "failed")
        self._finish(request, HandleStatus.FAILED, "failed", choice.errors[row])

    def _finish(self, request: Request, status: HandleStatus, reason: str, cause: BaseException | None = None) -> None:
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        self._by_handle.pop(entry.handle, None)
        report = report_row(request, entry.submission.prompt.notes)
        self._runner.stats.count([report], len(entry.handle.output.generated_tokens))
        entry.handle._end(status, reason, report, cause)

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        except BaseException as error:  # nobody else would hear of it, and the handles would wait for ever
            self._closed = self._closed or error
        finally:
            self._end_all(self._closed or CheckpointRuntimeError("the engine's thread has ended"))

    def _wait(self) -> bool:
        """Wait for something to do; False when the thread is to end."""
        with self._wake:
            while not self._notified and self._closed is None:
                if self._draining and not self._entries and not self._inbox:
                    return False
                self._wake.wait()
            self._notified = False
            return self._closed is None

    def _turn(self) -> None:
        """Take in what has come, run a step, and see to it that the next one runs if this one did anything."""
        runner = self._runner
        with runner.lock:
            self._end_cancelled()
            self._start()
            self._admit()
            progressed = run_step(runner)
            idle = not self._entries and not progressed
            if idle:
                runner.release_slack()
        if runner.broken is not None:
            raise runner.broken
        if progressed or self._inbox:
            self.poke()

    def _start(self) -> None:
        """See to it that the pools suit the model, at the cost of what runs if it has moved."""
        try:
            self._runner.start()
        except CheckpointRuntimeError as error:
            self._runner.lose(list(self._entries), error)
            with contextlib.suppress(CheckpointRuntimeError):  # until generate calls of other threads have ended too
                self._runner.start()

    def _admit(self) -> None:
        if not self._inbox or not self._runner.started:
            return
        identity = self._runner.identity()
        for _ in range(min(_ADMITTED_A_STEP, len(self._inbox))):
            submission = self._inbox.popleft()
            if not submission.handle.done():
                self._add(submission, identity)

    def _add(self, submission: Submission, identity: bytes) -> None:
        prompt = submission.prompt
        try:
            request = self._runner.new_request(
                prompt.token_ids, prompt.boundaries, identity, submission.salt, priority=submission.priority
            )
            device = self._runner.model.device
            chooser = TokenChooser(submission.settings, prompt.token_ids, submission.seed, device)
            self._entries[request] = _Entry(submission, chooser)
            self._by_handle[submission.handle] = request
            submission.handle._move(HandleStatus.PREFILLING)
            self._runner.add(request, self)
        except Exception as error:
            submission.handle._end(HandleStatus.FAILED, "failed", None, error)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            handle = self._cancelled.popleft()
            request = self._by_handle.get(handle)
            if request is not None:
                self._runner.end(request, "cancelled")
                self._finish(request, HandleStatus.CANCELLED, "cancelled")
            else:
                handle._end(HandleStatus.CANCELLED, "cancelled")

    def _end_all(self, error: BaseException) -> None:
        with self._wake:
            self._closed = error
            waiting = [submission.handle for submission in self._inbox]
            self._inbox.clear()
        with self._runner.lock:
            for request in list(self._entries):
                self._runner.end(request, "shutdown")
                self._finish(request, HandleStatus.FAILED, "shutdown", error)
            self._runner.release_slack()
        for handle in waiting:
            handle._end(HandleStatus.FAILED, "shutdown", None, error)

    def _notify(self) -> None:
        self._notified = True
        self._wake.notify_all()

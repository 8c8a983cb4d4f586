"""The engine's thread: takes submissions in and runs steps as long as there is anything to do."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

import torch

from .answers import Answers
from .errors import CheckpointRuntimeError
from .handles import Handle
from .outputs import HandleStatus
from .pins import Pin
from .runner import ModelRunner
from .steps import prepare_step, run_step
from .submissions import Submission

_ADMITTED_A_STEP = 256
"""Submissions taken in before a step; hashing the prompts of thousands at once would hold up those that decode."""


class StepLoop:
    """A thread that runs the steps of one model.

    Args:
        runner: of the model; its lock is held round each step only.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._answers = Answers(runner, self._look_ahead)
        self._wake = threading.Condition()
        self._inbox: deque[Submission] = deque()
        self._cancelled: deque[Handle] = deque()
        self._closed: BaseException | None = None
        self._draining = False
        self._notified = False
        self._thread = threading.Thread(target=self._run, name="ckpt_hf engine", daemon=True)

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
        """End the thread: once all requests have ended with ``drain``, else at once, each with an error.

        Raises:
            CheckpointRuntimeError: a step runs in this thread, which the loop's thread could not end before.
        """
        self.refuse_within_step("close the engine")
        with self._wake:
            self._draining = True
            if not drain and self._closed is None:
                self._closed = CheckpointRuntimeError("the engine was closed before the request had ended")
            self._notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def refuse_within_step(self, action: str) -> None:
        """Raise CheckpointRuntimeError in a thread that runs a step: what it waits for could never come."""
        if self._runner.lock.held:
            raise CheckpointRuntimeError(
                f"cannot {action} from within a step of the model (from a processor, criterion or streamer)"
            )

    def give_up(self) -> None:
        """Refuse everything from now on, in a process that has no copy of the thread; no lock is taken."""
        self._closed = CheckpointRuntimeError("it belongs to the process that this one was forked from")
        self._wake = threading.Condition()
        self._inbox.clear()
        self._runner.abandon()

    def wait_for_pin(self, handle: Handle, seconds: float | None) -> Pin:
        """What a submission without settings pins; nothing stays pinned if it fails or takes too long."""
        try:
            if not handle.wait(seconds):
                raise TimeoutError(f"the prefix was not computed within {seconds} s")
            handle.result(0)
            with self._runner.lock:
                return self._answers.take_pin(handle)
        except BaseException:  # also an interrupt while it waits
            with self._runner.lock:
                self._answers.cancel(handle)
            raise

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._wait():
                self.take_turn()
        except BaseException as error:  # nobody else would hear of it, and the handles would wait for ever
            self._closed = self._closed or error
        finally:
            self.end_all(self._closed or CheckpointRuntimeError("it is closed"))

    def _wait(self) -> bool:
        """Wait for something to do; False when the thread is to end."""
        with self._wake:
            while not self._notified and self._closed is None:
                if self._draining and not len(self._answers) and not self._inbox:
                    return False
                self._wake.wait()
            self._notified = False
            return self._closed is None

    def take_turn(self) -> None:
        """Take in what has come, run a step, and see to it that the next one runs if this one did anything."""
        runner = self._runner
        with runner.lock:
            while self._cancelled:
                self._answers.cancel(self._cancelled.popleft())
            self._answers.settle()
            self._start()
            self._admit()
            progressed = run_step(runner)
            if not len(self._answers) and not progressed:
                runner.release_slack()
        if runner.broken is not None:
            raise runner.broken
        if progressed or self._inbox:
            self.poke()

    def end_all(self, error: BaseException) -> None:
        """End every request with ``error`` and take no more."""
        with self._wake:
            self._closed = error
            waiting = [submission.handle for submission in self._inbox]
            self._inbox.clear()
        with self._runner.lock:
            self._answers.end_all("shutdown", error)
            self._runner.release_slack()
        for handle in waiting:
            handle.end(HandleStatus.FAILED, "shutdown", None, error)

    def _start(self) -> None:
        """See to it that the pools suit the model, at the cost of what runs if it has moved."""
        try:
            self._runner.start()
        except CheckpointRuntimeError as error:
            self._answers.lose_all(error)
            with contextlib.suppress(CheckpointRuntimeError):  # until generate calls of other threads have ended too
                self._runner.start()

    def _look_ahead(self) -> None:
        """What can be done for the next step while the device computes this one."""
        self._admit()
        prepare_step(self._runner)

    def _admit(self) -> None:
        if not self._inbox or not self._runner.started:
            return
        identity = self._runner.identity()
        for _ in range(min(_ADMITTED_A_STEP, len(self._inbox))):
            try:
                submission = self._inbox.popleft()
            except IndexError:  # closed meanwhile, by a thread that does not hold the lock
                return
            if not submission.handle.done():
                self._answers.add(submission, identity)

    def _notify(self) -> None:
        self._notified = True
        self._wake.notify_all()

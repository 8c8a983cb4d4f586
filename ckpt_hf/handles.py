"""What a caller holds of a submitted request: its tokens as they come, its result, a way to cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Protocol

import torch

from .errors import CheckpointRuntimeError, CheckpointValueError
from .outputs import GenerationOutput, HandleStatus, TextPieces
from .stats import RowReport


class HandleOwner(Protocol):
    """What a handle needs of the loop that serves it."""

    def cancel(self, handle: Handle) -> None:
        """End the request before the next step."""

    def refuse_within_step(self, action: str) -> None:
        """Raise in a thread that runs a step."""


class Handle:
    """A submitted request. All methods may be called from any thread.

    Iterating, also with ``async for``, gives the token ids of the answer as they come, each time from the first one,
    and raises what :meth:`result` raises. ``await handle`` gives the result.
    """

    def __init__(self, output: GenerationOutput, tokenizer: Any, owner: HandleOwner) -> None:
        self._output = output
        self._tokenizer = tokenizer
        self._owner = owner
        self._cause: BaseException | None = None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], object]] = []

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self._output.request_id

    @property
    def status(self) -> HandleStatus:
        """Where the request is now."""
        return self._output.status

    @property
    def output(self) -> GenerationOutput:
        """The result so far, in whatever state the request is; it goes on changing until it is finished."""
        return self._output

    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._output.is_finished()

    def cancel(self) -> bool:
        """Ask for the request's end; False when it has ended already. What was generated stays readable."""
        if self.done():
            return False
        self._owner.cancel(self)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the end; whether it has come.

        Raises:
            CheckpointValueError: ``timeout`` is no number of seconds.
            CheckpointRuntimeError: the calling thread runs the step that would have to bring it.
        """
        seconds = seconds_to_wait(timeout)
        self._check_may_wait()
        with self._changed:
            return self._changed.wait_for(self.done, seconds)

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """The finished output; of a cancelled request what there was.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds.
            CheckpointValueError: ``timeout`` is no number of seconds.
            CheckpointRuntimeError: it failed; ``__cause__`` is the reason.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is {self.status.value} after {timeout} s")
        if self._output.status is HandleStatus.FAILED:
            raise CheckpointRuntimeError(f"request {self.request_id} failed: {self._output.error}") from self._cause
        return self._output

    def text(self, **decode_kwargs: Any) -> Iterator[str]:
        """Pieces of the answer's text as they come, cut where transformers' ``TextStreamer`` cuts.

        Args:
            decode_kwargs: for the tokenizer's ``decode``; ``skip_special_tokens`` is True unless given.

        Raises:
            CheckpointRuntimeError: the engine has no tokenizer, or what :meth:`result` raises.
        """
        if self._tokenizer is None:
            raise CheckpointRuntimeError("text needs a tokenizer; give one to the Engine")
        pieces = TextPieces(self._tokenizer, **{"skip_special_tokens": True, **decode_kwargs})
        for token in self:
            pieces.put(torch.tensor([token]))
            yield from pieces.take()
        pieces.end()
        yield from pieces.take()

    def __iter__(self) -> Iterator[int]:
        tokens, seen = self._output.generated_tokens, 0
        while True:
            self._check_may_wait()
            with self._changed:
                self._changed.wait_for(lambda: len(tokens) > seen or self.done())  # noqa: B023
                fresh = tokens[seen:]
            if not fresh:
                self.result(0)
                return
            seen += len(fresh)
            yield from fresh

    def _check_may_wait(self) -> None:
        if not self.done():
            self._owner.refuse_within_step(f"wait for request {self.request_id}")

    async def __aiter__(self) -> AsyncIterator[int]:
        tokens, seen = self._output.generated_tokens, 0
        with self._events() as event:
            while True:
                event.clear()
                finished = self.done()  # before the look at the tokens: none comes after it
                fresh = tokens[seen:]
                seen += len(fresh)
                for token in fresh:
                    yield token
                if not fresh and finished:
                    self.result(0)
                    return
                if not fresh:
                    await event.wait()

    def __await__(self) -> Generator[Any, None, GenerationOutput]:
        return self._finished().__await__()

    async def _finished(self) -> GenerationOutput:
        with self._events() as event:
            while not self.done():
                await event.wait()
                event.clear()
        return self.result(0)

    @contextlib.contextmanager
    def _events(self) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set at every change."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            loop.call_soon_threadsafe(event.set)

        self._listeners.append(listener)
        try:
            yield event
        finally:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

    def push(self, token: int) -> None:
        """A token came."""
        now = time.perf_counter()
        with self._changed:
            if not self._output.generated_tokens:
                self._output.lifespan = (now, -1.0)
            self._output.generated_tokens.append(token)
            self._output.timestamps.append(now)
            self._changed.notify_all()
        self._tell()

    def move(self, status: HandleStatus) -> None:
        """The request got further."""
        self._output.status = status

    def end(
        self, status: HandleStatus, reason: str, usage: RowReport | None = None, cause: BaseException | None = None
    ) -> None:
        """Nothing more will come. A second end is ignored."""
        with self._changed:
            if self.done():
                return
            self._cause = cause
            self._output.error = None if cause is None else str(cause) or repr(cause)
            self._output.usage, self._output.finish_reason = usage, reason
            self._output.lifespan = (self._output.lifespan[0], time.perf_counter())
            self._output.status = status
            self._changed.notify_all()
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            try:
                listener()
            except RuntimeError:  # the listener's event loop has been closed
                self._listeners.remove(listener)


def seconds_to_wait(timeout: Any) -> float | None:
    """``timeout`` as Python's locks take it; more than they can wait is for ever.

    Raises:
        CheckpointValueError: it is neither None nor a number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__") or timeout != timeout:
        raise CheckpointValueError(f"timeout must be a number of seconds or None, got {timeout!r}")
    return None if timeout > threading.TIMEOUT_MAX else float(timeout)

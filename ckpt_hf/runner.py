"""What outlives a call of a patched model: its checkpoints, its scheduler, and everybody's requests."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from .audit import Auditor
from .config import CheckpointConfig
from .errors import CheckpointRuntimeError, CheckpointValueError
from .events import EventSinks
from .identity import adapters_identity, weights_identity
from .keys import CONTENT, KeyScope
from .memory import StepMemory
from .plan import StepPlan
from .recovery import Recovery, is_device_failure
from .requests import Request
from .sinks import LogitsSink, SinkTable
from .stats import CheckpointStats
from .turns import TurnLock

RUNNER_ATTRIBUTE = "_ckpt_hf_runner"


class ModelRunner:
    """Checkpoints of one model, and the requests that make and use them.

    ``call_lock`` lets one ``generate`` call at a time in; hold it round a call. ``lock`` guards everything below it;
    hold it round a step and round any look at requests, and take it last. A call may be made within another one of the
    same thread (by a streamer, say) except while a step runs.

    Args:
        model: a supported model whose layers have been patched.
        marker: id of the marker token, or None without a tokenizer.
        config: the caller's settings.
    """

    def __init__(self, model: Any, marker: int | None, config: CheckpointConfig) -> None:
        self.model = model
        self.marker = marker
        self.config = config
        self.call_lock = threading.RLock()
        self.lock = TurnLock()
        self.stats = CheckpointStats()
        self.events = EventSinks()
        self.auditor: Auditor | None = None
        self.engine: Any = None
        self.broken: BaseException | None = None
        self.prepared: StepPlan | None = None
        self.started = False
        self._ids = itertools.count()
        self.running = False
        self._placement: tuple[Any, Any] | None = None
        self._weights = b""
        self.sinks = SinkTable()
        self.recovery = Recovery()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRunner:
        """The runner of a copied model starts with no checkpoints: states are never shared between models."""
        return ModelRunner(memo[id(self.model)], self.marker, self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelRunner, (self.model, self.marker, self.config)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Round a ``generate`` call: waits for other threads' calls, and makes the pools.

        Raises:
            CheckpointRuntimeError: this thread is running a step of the model.
        """
        self.refuse_within_step()
        with self.call_lock:
            with self.lock:
                self.start()
            yield

    def start(self) -> None:
        """Make the pools on the model's device, anew if the model has moved or changed its dtype.

        Raises:
            CheckpointRuntimeError: the model runs, its device has failed, or it has moved or changed its dtype within
                a call.
        """
        self.refuse_within_step()
        if self.broken is not None:
            raise CheckpointRuntimeError(
                f"the device failed in an earlier step and nothing on it can be trusted; start a new process: "
                f"{self.broken!r}"
            ) from self.broken
        placement = (self.model.device, self.model.dtype)
        if self.started and placement == self._placement:
            return
        self.refuse_within_call("move the model or change its dtype")
        self._placement, self.prepared = placement, None
        self.memory = StepMemory(self.model, self.config, self.events)
        self.states, self.kv, self.slots = self.memory.states, self.memory.kv, self.memory.slots
        self.kv_rows, self.index = self.memory.kv_rows, self.memory.index
        self.scheduler, self.builder = self.memory.scheduler, self.memory.builder
        self.started = True

    def identity(self) -> bytes:
        """Digest of the model as it is now. Checkpoints of other weights can never be used again and are dropped."""
        weights = weights_identity(self.model)
        if weights != self._weights:
            self.index.clear()
            self._weights = weights
        identity = weights + adapters_identity(self.model)
        if self.memory.graphs is not None:
            self.memory.graphs.identity = identity
        return identity

    def new_request(
        self,
        token_ids: Sequence[int],
        boundaries: Sequence[int],
        identity: bytes,
        salt: str = "",
        ephemeral: frozenset[int] = frozenset(),
        **options: Any,
    ) -> Request:
        """A request of this model, for :meth:`add`; ``options`` are further arguments of :class:`Request`."""
        scope = KeyScope(identity, salt)
        keys, contents = (of.keys(token_ids, boundaries) for of in (scope, CONTENT))
        return Request(
            next(self._ids),
            list(token_ids),
            tuple(boundaries),
            keys,
            ephemeral,
            scope=scope,
            contents=contents,
            **options,
        )

    def refuse_within_call(self, action: str) -> None:
        """Raise CheckpointRuntimeError while any call or engine has requests."""
        if self.started and len(self.sinks):
            raise CheckpointRuntimeError(f"cannot {action} within a generate call of the same model")

    def abandon(self) -> None:
        """In a forked child: whoever held the lock, and whatever it was changing, is gone."""
        self.lock, self.started, self.engine = TurnLock(), False, None

    def refuse_within_step(self) -> None:
        """Raise CheckpointRuntimeError while this thread runs a step."""
        if self.running and self.lock.held:
            raise CheckpointRuntimeError("cannot run the model within its own forward")

    @contextlib.contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Who owns what is unknown after an interrupt between two of its steps, so all checkpoints are given up."""
        try:
            yield
        except CheckpointValueError:  # raised before anything changed
            raise
        except BaseException as error:
            self.started = False
            self.lose(self.sinks.requests, error)
            raise

    def add(self, request: Request, sink: LogitsSink) -> None:
        """Take a request in; steps run it, and ``sink`` gets its logits."""
        with self.lock, self.bookkeeping():
            self.scheduler.add(request)
            self.sinks.add(request, sink)

    def feed(self, request: Request, token: int) -> None:
        """Append a request's next token, to be computed by a coming step."""
        with self.lock:
            request.token_ids.append(token)

    def end(self, request: Request, reason: str = "cancelled") -> None:
        """End a request in whatever state it is."""
        with self.lock:
            self.sinks.remove(request)
            if self.started:  # else an interrupt has ended everything
                with self.bookkeeping():
                    self.scheduler.finish(request, reason)

    def finish(self, requests: Sequence[Request]) -> None:
        """End requests, wherever they are, and give back memory that only they needed."""
        with self.lock:
            for request in requests:
                self.end(request)
            self.release_slack()

    def release_slack(self) -> None:
        """Give back memory that nobody needs, if nobody has requests."""
        with self.lock, self.bookkeeping():
            if not self.started or len(self.sinks):
                return
            if self.prepared is not None:  # for requests that have all ended
                self.scheduler.rollback(self.prepared)
                self.prepared = None
            self.memory.trim()
            self.memory.release_slack()

    def lose(self, requests: Sequence[Request], error: BaseException) -> None:
        """End requests because of ``error``: all of them where the device has failed."""
        if is_device_failure(error):
            self.broken = error
            requests = self.sinks.requests
        for request in requests:
            if self.started and self.broken is None:
                self.scheduler.finish(request, "failed")
        self.sinks.lose(requests, error)


def runner_of(model: Any) -> ModelRunner:
    """The runner of a patched model.

    Raises:
        CheckpointRuntimeError: the model is not patched.
    """
    runner = getattr(model, "__dict__", {}).get(RUNNER_ATTRIBUTE)
    if runner is None:
        raise CheckpointRuntimeError("model is not patched; call ckpt_hf.patch(model, tokenizer) first")
    return runner

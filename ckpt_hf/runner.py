"""Runs plans on one model: pools, packed forwards, commits; the part of a patched model that outlives a call."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .attention import varlen_supported
from .batch import BatchBuilder
from .config import CheckpointConfig
from .errors import CheckpointRuntimeError
from .families import find_layers
from .identity import adapters_identity, weights_identity
from .index import CheckpointIndex, CheckpointLimits
from .keys import checkpoint_keys
from .kv import KVRows
from .layers import PackedCache
from .plan import StepPlan
from .pools import KVPools, StatePools
from .requests import Request
from .scheduler import Scheduler
from .slots import SlotAllocator
from .stats import CheckpointStats

RUNNER_ATTRIBUTE = "_ckpt_hf_runner"
_DEFAULT_MEMORY_SHARE = 10
_CPU_DEFAULT_BYTES = 1 << 30


class ModelRunner:
    """Checkpoints of one model and the steps that make and use them. Hold ``lock`` round a call.

    A call may be made within another one of the same thread (by a streamer, say) except while the model runs.

    Args:
        model: a supported model whose layers have been patched.
        marker: id of the marker token, or None without a tokenizer.
        config: the caller's settings.
    """

    def __init__(self, model: Any, marker: int | None, config: CheckpointConfig) -> None:
        self.model = model
        self.marker = marker
        self.config = config
        self.lock = threading.RLock()
        self.stats = CheckpointStats()
        self._ids = itertools.count()
        self.started = False
        self._running = False
        self._placement: tuple[Any, Any] | None = None
        self._weights = b""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRunner:
        """The runner of a copied model starts with no checkpoints: states are never shared between models."""
        return ModelRunner(memo[id(self.model)], self.marker, self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelRunner, (self.model, self.marker, self.config)

    def start(self) -> None:
        """Make the pools on the model's device, anew if the model has moved or changed its dtype.

        Raises:
            CheckpointRuntimeError: the model runs, or has moved or changed its dtype within a call.
        """
        if self._running:
            self.refuse_within_call("run the model within its own forward")
        placement = (self.model.device, self.model.dtype)
        if self.started and placement == self._placement:
            return
        self.refuse_within_call("move the model or change its dtype")
        self._placement = placement
        device, dtype = placement
        shapes = find_layers(self.model).shapes()
        self.states = StatePools(shapes, getattr(torch, self.config.state_dtype), dtype, device)
        self.kv = KVPools(shapes, dtype, device)
        self.slots, self.kv_rows = SlotAllocator(), KVRows()
        self.index = CheckpointIndex(self.slots, self.kv_rows, self._limits(device))
        self.scheduler = Scheduler(self.index, self.slots, self.kv_rows, self.config.max_batch_tokens)
        head_dims = {shape[-1] for shape in shapes.kv.values()}
        self.builder = BatchBuilder(device, all(varlen_supported(device, dtype, d) for d in head_dims))
        self.started = True

    def identity(self) -> bytes:
        """Digest of the model as it is now. Checkpoints of other weights can never be used again and are dropped."""
        weights = weights_identity(self.model)
        if weights != self._weights:
            self.index.clear()
            self._weights = weights
        return weights + adapters_identity(self.model)

    def new_request(
        self,
        token_ids: Sequence[int],
        boundaries: Sequence[int],
        identity: bytes,
        salt: str = "",
        ephemeral: frozenset[int] = frozenset(),
        decode: bool = True,
    ) -> Request:
        """A request of this model, for :meth:`add`."""
        keys = checkpoint_keys(token_ids, boundaries, identity, salt)
        return Request(next(self._ids), list(token_ids), tuple(boundaries), keys, ephemeral, decode)

    def refuse_within_call(self, action: str) -> None:
        """Raise CheckpointRuntimeError while a call of this thread, which holds the lock, has requests."""
        if self.started and self.scheduler.requests:
            raise CheckpointRuntimeError(f"cannot {action} within a generate call of the same model")

    @contextlib.contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """Who owns what is unknown after an interrupt between two of its steps, so all checkpoints are given up."""
        try:
            yield
        except BaseException:
            self.started = False
            raise

    def add(self, request: Request) -> None:
        """Take a request in; :meth:`prefill` runs it."""
        with self._bookkeeping():
            self.scheduler.add(request)

    def end(self, request: Request) -> None:
        """End a request in whatever state it is."""
        if self.started:  # else an interrupt has ended everything
            with self._bookkeeping():
                self.scheduler.finish(request)

    def prefill(self) -> dict[Request, Tensor]:
        """Run every scheduled prompt to its end; the logits ``[V]`` after the last token of each."""
        logits: dict[Request, Tensor] = {}
        while True:
            with self._bookkeeping():
                plan = self.scheduler.plan_prefill()
            if plan is None:
                return logits
            self.stats.prefill_steps += 1
            logits.update(self._execute(plan))

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Run the newest token of each request; the logits ``[len(requests), V]``."""
        self.stats.decode_steps += 1
        with self._bookkeeping():
            plan = self.scheduler.plan_decode(r.request_id for r in requests)
        results = self._execute(plan)
        return torch.stack([results[r] for r in requests])

    def finish(self, requests: Sequence[Request]) -> None:
        """End requests, wherever they are, and give back memory that only they needed."""
        for request in requests:
            self.end(request)
        with self._bookkeeping():
            self._release_slack()

    def refresh_stats(self) -> CheckpointStats:
        """A copy of the statistics with the current gauges."""
        if not self.started:
            return replace(self.stats, evictions=0, checkpoints=0, slots_used=0, bytes_used=0)
        stats = replace(self.stats, evictions=self.index.evictions, checkpoints=len(self.index))
        stats.slots_used, stats.bytes_used = self.slots.used, self.index.bytes_used()
        return stats

    def _execute(self, plan: StepPlan) -> dict[Request, Tensor]:
        try:
            self._running = True
            rows = self._forward(plan)
        except BaseException:
            with self._bookkeeping():
                self.scheduler.rollback(plan)
            raise
        finally:
            self._running = False
        for i, piece in enumerate(plan.pieces):
            if piece.publishes is not None:
                piece.publishes.logits = rows[i].clone()
        results = {}
        for wanted in plan.logits:  # before the commit, which may evict the checkpoint that holds them
            source = wanted.checkpoint
            results[wanted.request] = rows[wanted.piece] if source is None else source.logits  # type: ignore[index]
        with self._bookkeeping():
            self.scheduler.commit(plan)
        return results

    def _forward(self, plan: StepPlan) -> dict[int, Tensor]:
        """Logits ``[V]`` of the pieces that want them, by piece index."""
        self.states.reserve(self.slots.high_water)
        self.kv.reserve(self.kv_rows.high_water)
        if not plan.num_tokens:
            self.states.copy([p.source for p in plan.pieces], [p.destination for p in plan.pieces])
            return {}
        batch = self.builder.build(plan, self.states.num_slots)
        output = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask={"full_attention": None, "linear_attention": None},
            cache=PackedCache(batch, self.states, self.kv),
            use_cache=True,
            logits_to_keep=batch.logits_columns,
            return_dict=True,
        )
        return dict(zip(plan.logits_pieces, output.logits[0], strict=True))

    def _limits(self, device: torch.device) -> CheckpointLimits:
        budget = self.config.cache_bytes
        if budget is None and self.config.cache_slots is None:
            budget = _CPU_DEFAULT_BYTES
            if device.type == "cuda":
                budget = torch.cuda.get_device_properties(device).total_memory // _DEFAULT_MEMORY_SHARE
        return CheckpointLimits(
            self.config.cache_slots, budget, self.states.bytes_per_slot, self.kv.bytes_per_row, lambda row: row.nbytes
        )

    def _release_slack(self) -> None:
        """Shrink the pools when they hold more memory for nobody than the checkpoints may use."""
        if not self.started or self.scheduler.requests:
            return
        slack = (self.states.num_slots - self.slots.used) * self.states.bytes_per_slot
        slack += (self.kv.num_rows - self.kv_rows.used) * self.kv.bytes_per_row
        allowed = self.index.limits.bytes
        if allowed is None:
            allowed = (self.index.limits.slots or 1) * self.states.bytes_per_slot
        if slack <= allowed:
            return
        moved = self.slots.compact()
        self.states.compact(list(moved))
        for checkpoint in self.index.checkpoints:
            if checkpoint.slot is not None:
                checkpoint.slot = moved[checkpoint.slot]
        self.kv.compact(self.kv_rows.compact())
        self.builder.forget()


def runner_of(model: Any) -> ModelRunner:
    """The runner of a patched model.

    Raises:
        CheckpointRuntimeError: the model is not patched.
    """
    runner = getattr(model, "__dict__", {}).get(RUNNER_ATTRIBUTE)
    if runner is None:
        raise CheckpointRuntimeError("model is not patched; call ckpt_hf.patch(model, tokenizer) first")
    return runner

"""Host time of the scheduler for a step, over the number of requests that wait.

    python -m benchmarks.scheduler_overhead

The steady state of a busy server: a number of requests run, each gets a token in every step, some end and as many
others arrive, so that the number of those that wait stays the same. No model runs; a step is planned and committed at
once. Timed, in CPU time of the thread, are planning, committing, ending and taking in; hashing a prompt is its caller's
work and is not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ckpt_hf.admission import AdmissionLimits
from ckpt_hf.index import CheckpointIndex, CheckpointLimits
from ckpt_hf.keys import KeyScope
from ckpt_hf.kv import KVRows
from ckpt_hf.requests import Request, RequestStatus
from ckpt_hf.scheduler import Scheduler
from ckpt_hf.slots import SlotAllocator

WAITING = (10, 100, 1_000, 10_000)
SHORTEST_ANSWER, LONGEST_ANSWER = 16, 48
PREFIX_TOKENS, SUFFIX_TOKENS = 512, 64
_FOREVER = 1 << 62
_SCOPE = KeyScope(b"model")
_SLOT_BYTES, _TOKEN_BYTES, _CACHE_BYTES = 64 << 20, 32 << 10, 8 << 30


@dataclass(frozen=True, slots=True)
class Traffic:
    """What kind of requests arrive.

    Attributes:
        name: for the table.
        anchor: prefix that the i-th request shares, or None.
        priority: of the i-th request.
        stuck: all of them wait for one Producer that never gets its turn to finish.
    """

    name: str
    anchor: Callable[[int], int | None]
    priority: Callable[[int], int] = lambda i: 0
    stuck: bool = False


TRAFFIC = (
    Traffic("nothing shared", lambda i: None),
    Traffic("16 requests an anchor", lambda i: i // 16),
    Traffic("one anchor for all", lambda i: 0),
    Traffic("an anchor each, three priorities", lambda i: i, lambda i: i % 3),
    Traffic("all wait for one slow Producer", lambda i: 0, stuck=True),
)


class Server:
    """A scheduler under a constant load.

    Args:
        traffic: what arrives.
        waiting: requests that wait at any time.
        running: requests that run at any time.
    """

    def __init__(self, traffic: Traffic, waiting: int, running: int = 64) -> None:
        slots, rows = SlotAllocator(), KVRows()
        limits = CheckpointLimits(None, _CACHE_BYTES, _SLOT_BYTES, _TOKEN_BYTES, lambda logits: 0)
        index = CheckpointIndex(slots, rows, limits)
        self.scheduler = Scheduler(index, slots, rows, 8192, limits=AdmissionLimits(running))
        self._traffic = traffic
        self._arrived = 0
        self._ends: dict[int, int] = {}
        self._prepared: list[Request] = []
        if traffic.stuck:
            self._start_stuck_producer(running)
        for _ in range(waiting + running * (not traffic.stuck)):
            self.scheduler.add(self._make())

    def step(self) -> None:
        """Plan and commit a step, append a token to each answer, replace those that have ended."""
        scheduler = self.scheduler
        plan = scheduler.plan_step()
        assert plan is not None
        scheduler.commit(plan)
        for request in scheduler.running:
            if request.status is RequestStatus.DECODE:
                request.token_ids.append(7)
                if len(request.token_ids) > self._ends.get(request.request_id, _FOREVER):
                    scheduler.finish(request, "length")
                    scheduler.add(self._prepared.pop())

    def prepare(self) -> None:
        """Make the requests that may arrive in the next step."""
        while len(self._prepared) < len(self.scheduler.running):
            self._prepared.insert(0, self._make())

    def _make(self) -> Request:
        i = self._arrived
        self._arrived += 1
        anchor = self._traffic.anchor(i)
        own = [1_000_000 + i] * SUFFIX_TOKENS
        if anchor is None:
            request = Request(i, own, (), (), scope=_SCOPE)
        else:
            ids = [anchor] * PREFIX_TOKENS + own
            boundaries = (PREFIX_TOKENS, len(ids))
            keys = _SCOPE.keys(ids, boundaries)
            soft = frozenset({len(ids)})
            request = Request(i, ids, boundaries, keys, priority=self._traffic.priority(i), soft=soft, scope=_SCOPE)
        # Answers of all lengths, so that the load is the same in every step.
        self._ends[i] = len(request.token_ids) + SHORTEST_ANSWER + i * 7919 % (LONGEST_ANSWER - SHORTEST_ANSWER)
        return request

    def _start_stuck_producer(self, running: int) -> None:
        """Others that decode for ever, and a Producer that has begun and is then starved of budget."""
        for i in range(running - 1):
            self.scheduler.add(Request(-1 - i, [i + 1], (), ()))
        self.step()
        ids = [0] * PREFIX_TOKENS
        producer = Request(-running, ids, (PREFIX_TOKENS,), _SCOPE.keys(ids, (PREFIX_TOKENS,)), scope=_SCOPE)
        self.scheduler.add(producer)
        self.scheduler.max_batch_tokens = running - 1 + 64
        self.step()
        self.scheduler.max_batch_tokens = running - 1
        self.scheduler.lease_steps = 1 << 30


@dataclass(frozen=True, slots=True)
class Overhead:
    """Host time of a step in microseconds of CPU time."""

    mean: float
    p99: float


def measure(server: Server, steps: int, warmup: int = 64) -> Overhead:
    """Time ``steps`` steps one by one, after ``warmup`` others that reach the steady state."""
    for _ in range(warmup):
        server.prepare()
        server.step()
    gc.collect()
    gc.freeze()  # a collection that walks ten thousand prompts is not the scheduler's
    times = []
    for _ in range(steps):
        server.prepare()
        start = time.thread_time()
        server.step()
        times.append(1e6 * (time.thread_time() - start))
    gc.unfreeze()
    times.sort()
    return Overhead(statistics.mean(times), times[int(0.99 * (len(times) - 1))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING)
    options = parser.parse_args(arguments)
    lengths = f"answers of {SHORTEST_ANSWER} to {LONGEST_ANSWER} tokens"
    table = Table(title=f"microseconds a step, mean / 99th percentile; {options.running} running, {lengths}")
    table.add_column("waiting")
    for waiting in options.waiting:
        table.add_column(f"{waiting:,}", justify="right")
    for traffic in TRAFFIC:
        cells = [measure(Server(traffic, n, options.running), options.steps) for n in options.waiting]
        table.add_row(traffic.name, *(f"{cell.mean:.0f} / {cell.p99:.0f}" for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main()

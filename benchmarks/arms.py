"""The arms: six ways to cut one load into calls, each checked against the float64 recurrence before it is timed.

Tables of segments are made beforehand, as a step makes them once for all its layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from benchmarks.parts import Tokens
from benchmarks.workload import START_SLOT, Workload
from ckpt_ops import Segment, SegmentTable


class Arm(ABC):
    """One way to run a load. Making one lays out its inputs and tables; :meth:`run` is what is timed."""

    name: str
    title: str
    project = ""  # the peer whose kernels run; empty for ours
    keeps_checkpoints = True
    allowance = 1.0

    def __init__(self, work: Workload) -> None:
        self.work, self.part = work, work.part

    @abstractmethod
    def run(self) -> list[Tensor]:
        """Run the load once; the outputs of each call."""

    def chunked(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        """One chunked call; a peer's arm puts the peer's here."""
        return self.part.chunked(tokens, table)

    def packed(self, outputs: list[Tensor]) -> Tensor:
        """The outputs of :meth:`run` in the load's packed order ``[T, H_v, D]``."""
        return torch.cat(outputs)

    def load_states(self) -> None:  # noqa: B027  (most arms work on the load's own pool)
        """Take the states from the load's pool, where the arm has a pool of its own; never timed."""

    def store_states(self) -> None:  # noqa: B027
        """Give the states back to the load's pool; never timed."""

    def check(self) -> float:
        """Run once on poisoned slots and compare with fp64; the relative error."""
        self.work.poison()
        self.load_states()
        outputs = self.packed(self.run())
        self.store_states()
        return self.work.check(outputs, checkpoints=self.keeps_checkpoints, allowance=self.allowance)


class InFull(Arm):
    """Nothing is shared: each Consumer's whole prompt runs, all in one packed chunked call."""

    name, title = "in_full", "nothing shared, one packed call"
    keeps_checkpoints = False

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        load, bounds, producers = work.load, work.bounds, len(work.load.producers)
        pieces, segments = [], []
        self.places: dict[int, int] = {}  # request -> its first row in this arm's batch
        rows = 0
        for consumer, length in enumerate(load.consumers):
            parent = load.parent(consumer)
            prefix = load.producers[parent]
            self.places.setdefault(parent, rows)
            self.places[producers + consumer] = rows + prefix
            pieces += [
                (bounds[parent], bounds[parent + 1]),
                (bounds[producers + consumer], bounds[producers + consumer + 1]),
            ]
            segments.append(Segment(prefix + length, source=START_SLOT, destination=work.private_slot(consumer)))
            rows += prefix + length
        self.tokens = tuple(torch.cat([x[start:stop] for start, stop in pieces]) for x in self.part.tokens)
        self.table = work.table(segments)

    def run(self) -> list[Tensor]:
        return [self.chunked(self.tokens, self.table)]

    def packed(self, outputs: list[Tensor]) -> Tensor:
        lengths = (*self.work.load.producers, *self.work.load.consumers)
        return torch.cat([outputs[0][self.places[i] : self.places[i] + n] for i, n in enumerate(lengths)])


class OneByOne(Arm):
    """One chunked call for each request: the Producers, then every Consumer from the checkpoint's slot."""

    name, title = "one_by_one", "one chunked call a request"

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        segments = [*work.producer_segments(), *work.consumer_segments()]
        self.calls = [
            (tokens, work.table([segment])) for tokens, segment in zip(work.requests(), segments, strict=True)
        ]

    def run(self) -> list[Tensor]:
        return [self.chunked(tokens, table) for tokens, table in self.calls]


class TokenSerialOneByOne(Arm):
    """The legacy way: token by token, one call for each Producer, then a copy of the states and a call a Consumer."""

    name, title = "legacy", "token-serial, one call a request"

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        segments = [*work.producer_segments(), *work.consumer_segments(in_place=True)]
        self.calls = [
            (tokens, work.table([segment])) for tokens, segment in zip(work.requests(), segments, strict=True)
        ]

    def run(self) -> list[Tensor]:
        outputs = []
        for request, (tokens, table) in enumerate(self.calls):
            consumer = request - len(self.work.load.producers)
            if consumer >= 0:
                for pool in self.part.pools:
                    pool[self.work.private_slot(consumer)].copy_(pool[self.work.shared_slot(consumer)])
            outputs.append(self.part.token_serial(tokens, table))
        return outputs


class TokenSerialBatched(Arm):
    """The legacy kernel in two packed calls, with one copy of all Consumers' states between them."""

    name, title = "legacy_batched", "token-serial, two packed calls"

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        consumers = range(len(work.load.consumers))
        self.phases = (
            (work.rows(0, work.prefix_tokens), work.table(work.producer_segments())),
            (work.rows(work.prefix_tokens, work.bounds[-1]), work.table(work.consumer_segments(in_place=True))),
        )
        self.shared = torch.tensor([work.shared_slot(c) for c in consumers], device=work.device)
        self.private = torch.tensor([work.private_slot(c) for c in consumers], device=work.device)

    def run(self) -> list[Tensor]:
        first = self.part.token_serial(*self.phases[0])
        for pool in self.part.pools:
            pool.index_copy_(0, self.private, pool.index_select(0, self.shared))
        return [first, self.part.token_serial(*self.phases[1])]


class TwoPhase(Arm):
    """Ours: Producers and Consumers in one two-phase call, states read from and written to their slots."""

    name, title = "two_phase", "two-phase, one packed call"

    def run(self) -> list[Tensor]:
        return [self.chunked(self.part.tokens, self.work.forest)]


class TwoCalls(Arm):
    """Producers in one packed chunked call, then Consumers in another, which read the checkpoints."""

    name, title = "two_calls", "two packed chunked calls"

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.phases = (
            (work.rows(0, work.prefix_tokens), work.table(work.producer_segments())),
            (work.rows(work.prefix_tokens, work.bounds[-1]), work.table(work.consumer_segments())),
        )

    def run(self) -> list[Tensor]:
        return [self.chunked(tokens, table) for tokens, table in self.phases]


ARMS: tuple[type[Arm], ...] = (InFull, OneByOne, TokenSerialOneByOne, TokenSerialBatched, TwoCalls, TwoPhase)
BASELINE = TokenSerialOneByOne.name
"""The arm that ratios are against, as in the first published figures."""

"""The arms: five ways to cut one load into calls, each checked against the float64 recurrence before it is timed.

Slots of the pools: 0 holds the state that all Producers start from, ``1 .. P`` are the checkpoints, one for each
Producer, and the rest are private, one for each Consumer. Packed tokens: Producers first, then Consumers. Tables of
segments are made beforehand, as a step makes them once for all its layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.loads import Load, Shape
from benchmarks.parts import Part, Tokens, make_part
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.testing import relative_error

START_SLOT = 0


class Workload:
    """One load on one device: a part with inputs and pools, where each request's rows lie, and the fp64 result."""

    def __init__(self, shape: Shape, load: Load, device: torch.device | str, seed: int = 1) -> None:
        self.shape, self.load, self.device = shape, load, torch.device(device)
        self.num_slots = 1 + len(load.producers) + len(load.consumers)
        self.bounds = list(accumulate((*load.producers, *load.consumers), initial=0))
        self.part: Part = make_part(shape, self.bounds[-1], self.num_slots, self.device, seed)
        self.forest = self.table([*self.producer_segments(), *self.consumer_segments(linked=True)])
        self._expected: tuple[Tensor, tuple[Tensor, ...]] | None = None

    @property
    def prefix_tokens(self) -> int:
        """Tokens of all Producers: where the Consumers' rows begin."""
        return self.bounds[len(self.load.producers)]

    def shared_slot(self, consumer: int) -> int:
        """The checkpoint that a Consumer starts from."""
        return 1 + self.load.parent(consumer)

    def private_slot(self, consumer: int) -> int:
        """Where a Consumer's final state goes."""
        return 1 + len(self.load.producers) + consumer

    def producer_segments(self) -> list[Segment]:
        """From the start slot to the checkpoints."""
        return [Segment(n, source=START_SLOT, destination=1 + p) for p, n in enumerate(self.load.producers)]

    def consumer_segments(self, *, linked: bool = False, in_place: bool = False) -> list[Segment]:
        """To the private slots, from the Producers of this batch (linked), from themselves, or from the checkpoints."""
        segments = []
        for consumer, length in enumerate(self.load.consumers):
            kept = self.private_slot(consumer)
            if linked:
                segments.append(Segment(length, parent=self.load.parent(consumer), destination=kept))
            else:
                source = kept if in_place else self.shared_slot(consumer)
                segments.append(Segment(length, source=source, destination=kept))
        return segments

    def table(self, segments: Sequence[Segment]) -> SegmentTable:
        """A table on this load's device and pools."""
        return SegmentTable.build(segments, self.num_slots, self.device)

    def rows(self, start: int, stop: int) -> Tokens:
        """The token tensors' rows ``start:stop``, as a batch of its own."""
        return tuple(x[start:stop].clone() for x in self.part.tokens)

    def requests(self) -> Iterator[Tokens]:
        """The rows of each Producer, then of each Consumer."""
        return (self.rows(start, stop) for start, stop in pairwise(self.bounds))

    def check(self, out: Tensor, *, checkpoints: bool) -> float:
        """Compare a packed result and the states in the slots with fp64.

        Args:
            out: ``[T, H_v, D]``.
            checkpoints: the Producers' states were kept and are compared too.

        Returns:
            The larger of the outputs' and the states' relative error.

        Raises:
            RuntimeError: an error exceeds the part's budget.
        """
        if self._expected is None:
            self._expected = self.part.reference(self.forest)
        expected, pools = self._expected
        first = 1 if checkpoints else self.private_slot(0)
        errors = {
            "outputs": relative_error(out, expected),
            "states": relative_error(self.part.pools[0][first:], pools[0][first:]),
        }
        for name, error in errors.items():
            if not error <= self.part.budget:
                raise RuntimeError(
                    f"{self.load.name}: relative error {error:.2e} of the {name} against fp64; "
                    f"at most {self.part.budget:.2e} is right"
                )
        for pool, right in zip(self.part.pools[1:], pools[1:], strict=True):
            # A convolution's state is made of input tokens, so there is nothing to round.
            if not torch.equal(pool[first:].double(), right[first:]):
                raise RuntimeError(
                    f"{self.load.name}: the convolution's states are not the last tokens of each request"
                )
        return max(errors.values())

    def poison(self) -> None:
        """Fill all slots but the start slot with NaN, so that only a state written since can pass the check."""
        for pool in self.part.pools:
            pool[START_SLOT + 1 :] = torch.nan


class Arm(ABC):
    """One way to run a load. Making one lays out its inputs and tables; :meth:`run` is what is timed."""

    name: str
    title: str
    keeps_checkpoints = True

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

    def check(self) -> float:
        """Run once on poisoned slots and compare with fp64; the relative error."""
        self.work.poison()
        return self.work.check(self.packed(self.run()), checkpoints=self.keeps_checkpoints)


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


ARMS: tuple[type[Arm], ...] = (InFull, OneByOne, TokenSerialOneByOne, TokenSerialBatched, TwoPhase)
BASELINE = TokenSerialOneByOne.name
"""The arm that ratios are against, as in the first published figures."""

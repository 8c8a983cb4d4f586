"""One load on one device: inputs, pools, where each request's rows and slots lie, and the float64 result.

Slots of the pools: 0 holds the state that all Producers start from, ``1 .. P`` are the checkpoints, one for each
Producer, and the rest are private, one for each Consumer. Packed tokens: Producers first, then Consumers.
"""

from __future__ import annotations

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

    def check(self, out: Tensor, *, checkpoints: bool, allowance: float = 1.0) -> float:
        """Compare a packed result and the states in the slots with fp64.

        Args:
            out: ``[T, H_v, D]``.
            checkpoints: the Producers' states were kept and are compared too.
            allowance: factor on the budget, for kernels that round more often than it counts.

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
        budget = allowance * self.part.budget
        for name, error in errors.items():
            if not error <= budget:
                raise RuntimeError(
                    f"{self.load.name}: relative error {error:.2e} of the {name} against fp64; "
                    f"at most {budget:.2e} is right"
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

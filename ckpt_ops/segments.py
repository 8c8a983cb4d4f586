"""Which tokens of a packed batch belong together, where each sequence starts from and where its state goes.

State layout, for the whole package: the recurrent pool is ``states [num_slots, H_v, D_k, D_v]`` (key dimension first),
the convolution pool ``states [num_slots, C, W - 1]`` (oldest token first: column ``W - 2`` is the newest). Tokens are
packed: those of segment ``n`` are the rows ``cu_seqlens[n]:cu_seqlens[n + 1]`` of every token tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ckpt_ops.errors import ArgumentError
from ckpt_ops.readings import read_device, read_integer, read_integers, read_items

_INT32_MAX = 2**31 - 1
# Each part of the one transfer starts at a 16-byte boundary, so that Triton compiles one variant for all batch sizes.
_ALIGN = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of tokens of one sequence.

    Attributes:
        length: number of tokens, at least 0. A segment of length 0 copies its start state to its destination.
        parent: index, in the same batch, of the segment whose final state is the start; -1 for none.
        source: slot that the start state is read from when there is no parent; -1 starts from zero.
        destination: slot that the final state is written to; -1 when it is not kept.
    """

    length: int
    parent: int = -1
    source: int = -1
    destination: int = -1


_FIELDS = tuple(field.name for field in fields(Segment))


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """The segments of one step as device tensors; made once a step on the host and shared by all layers.

    Attributes:
        cu_seqlens: int32 ``[N + 1]``, cumulated lengths.
        parents, sources, destinations: int32 ``[N]``, as in :class:`Segment`; a child's source is its parent's
            destination.
        phase_offsets: phase ``p`` holds the segments ``phase_offsets[p]:phase_offsets[p + 1]``. A segment's phase is
            its depth in the forest. There are at least two phases, the second empty if no segment has a parent, so
            that steps with and without Consumers look the same to ``torch.compile``.
        num_segments: N.
        num_tokens: ``cu_seqlens[N]``.
        num_phases: number of phases that hold a segment.
        num_slots: number of slots of the pools that the table was checked against.
    """

    cu_seqlens: Tensor
    parents: Tensor
    sources: Tensor
    destinations: Tensor
    phase_offsets: tuple[int, ...]
    num_segments: int
    num_tokens: int
    num_phases: int
    num_slots: int

    @classmethod
    def build(cls, segments: Sequence[Segment], num_slots: int, device: torch.device | str) -> SegmentTable:
        """Check ``segments`` on the host and copy them to ``device`` in one transfer, without a device sync.

        Args:
            segments: sorted by depth (parents before children, level by level).
            num_slots: number of slots of the pools that the table will be used with.
            device: device of the pools.

        Raises:
            ArgumentError: a length, parent or slot is out of range, the order is wrong, or two segments would race for
                a slot.
        """
        num_slots = read_integer("num_slots", num_slots)
        if not 0 <= num_slots <= _INT32_MAX:
            raise ArgumentError(f"num_slots must be at least 0 and at most {_INT32_MAX}, got {num_slots}")
        device = read_device(device)
        segments = [
            _checked(index, segment, num_slots) for index, segment in enumerate(read_items("segments", segments))
        ]
        depths = _depths(segments)
        _check_races(segments)
        offsets = _phase_offsets(depths)
        bounds = [0]
        for segment in segments:
            bounds.append(bounds[-1] + segment.length)
        if bounds[-1] > _INT32_MAX:
            raise ArgumentError(f"segments: {bounds[-1]} tokens in all; a batch holds at most {_INT32_MAX}")
        # A child starts from its parent's slot: resolved here, so that no kernel follows the link.
        starts = [
            segment.source if segment.parent < 0 else segments[segment.parent].destination for segment in segments
        ]
        cu_seqlens, parents, sources, destinations = _transfer(
            (
                bounds,
                [segment.parent for segment in segments],
                starts,
                [segment.destination for segment in segments],
            ),
            device,
        )
        return cls(
            cu_seqlens=cu_seqlens,
            parents=parents,
            sources=sources,
            destinations=destinations,
            phase_offsets=offsets,
            num_segments=len(segments),
            num_tokens=bounds[-1],
            num_phases=max(depths, default=-1) + 1,
            num_slots=num_slots,
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int],
        num_slots: int,
        device: torch.device | str,
        *,
        sources: Sequence[int] | None = None,
        destinations: Sequence[int] | None = None,
    ) -> SegmentTable:
        """Table of independent sequences given by cumulated lengths ``[N + 1]`` that start at 0 and never decrease.

        Raises:
            ArgumentError: as :meth:`build`, or ``cu_seqlens`` is not monotonic or does not start at 0.
        """
        cu_seqlens = read_integers("cu_seqlens", cu_seqlens)
        if len(cu_seqlens) == 0 or cu_seqlens[0] != 0:
            raise ArgumentError(f"cu_seqlens must start with 0, got {list(cu_seqlens[:4])}")
        count = len(cu_seqlens) - 1
        for index in range(count):
            if cu_seqlens[index + 1] < cu_seqlens[index]:
                raise ArgumentError(
                    f"cu_seqlens must never decrease, but cu_seqlens[{index + 1}] = {cu_seqlens[index + 1]} follows "
                    f"{cu_seqlens[index]}"
                )
        slots: list[Sequence[int]] = []
        for name, given in (("sources", sources), ("destinations", destinations)):
            slots.append([-1] * count if given is None else read_integers(name, given))
            if len(slots[-1]) != count:
                raise ArgumentError(f"{name} must have one slot for each of {count} sequences, got {len(slots[-1])}")
        lengths = (cu_seqlens[index + 1] - cu_seqlens[index] for index in range(count))
        packed = zip(lengths, slots[0], slots[1], strict=True)
        segments = [Segment(length, source=source, destination=kept) for length, source, kept in packed]
        return cls.build(segments, num_slots, device)


def _checked(index: int, segment: Segment, num_slots: int) -> Segment:
    where = f"segments[{index}]"
    segment = Segment(*[read_integer(name, getattr(segment, name, segment), f"{where}.") for name in _FIELDS])
    if segment.length < 0:
        raise ArgumentError(f"{where}.length must be at least 0, got {segment.length}")
    if not -1 <= segment.parent < index:
        raise ArgumentError(
            f"{where}.parent must be -1 or the index of an earlier segment (0 to {index - 1}), got {segment.parent}"
        )
    if segment.parent >= 0 and segment.source >= 0:
        raise ArgumentError(
            f"{where} names both parent {segment.parent} and source {segment.source}; a segment starts from one of them"
        )
    for name, slot in (("source", segment.source), ("destination", segment.destination)):
        if not -1 <= slot < num_slots:
            raise ArgumentError(f"{where}.{name} must be -1 or a slot from 0 to {num_slots - 1}, got {slot}")
    return segment


def _depths(segments: Sequence[Segment]) -> list[int]:
    depths: list[int] = []
    for index, segment in enumerate(segments):
        depths.append(0 if segment.parent < 0 else depths[segment.parent] + 1)
        if index and depths[index] < depths[index - 1]:
            raise ArgumentError(
                f"segments must be sorted by depth, but segments[{index}] (depth {depths[index]}) follows depth "
                f"{depths[index - 1]}"
            )
    return depths


def _phase_offsets(depths: Sequence[int]) -> tuple[int, ...]:
    starts = [index for index, depth in enumerate(depths) if index == 0 or depth != depths[index - 1]]
    offsets = [*(starts or [0]), len(depths)]
    while len(offsets) < 3:
        offsets.append(len(depths))
    return tuple(offsets)


def _check_races(segments: Sequence[Segment]) -> None:
    """Programs of one launch run in any order, so a slot that one writes must not be read or written by another."""
    writer: dict[int, int] = {}
    for index, segment in enumerate(segments):
        if segment.destination < 0:
            continue
        other = writer.setdefault(segment.destination, index)
        if other != index:
            raise ArgumentError(
                f"segments[{other}] and segments[{index}] both have destination {segment.destination}; destinations "
                "must differ"
            )
    for index, segment in enumerate(segments):
        owner = writer.get(segment.source, index) if segment.source >= 0 else index
        if owner != index:
            raise ArgumentError(
                f"segments[{index}].source {segment.source} is the destination of segments[{owner}]; use parent to "
                "continue a segment of the same batch"
            )
    for parent in _parents(segments):
        segment = segments[parent]
        if segment.destination < 0:
            raise ArgumentError(f"segments[{parent}] has children, so its destination must be a slot, got -1")
        if segment.source == segment.destination:
            raise ArgumentError(
                f"segments[{parent}] has children, so its source and destination must differ, both are {segment.source}"
            )


def _parents(segments: Sequence[Segment]) -> Iterator[int]:
    yield from sorted({segment.parent for segment in segments if segment.parent >= 0})


def _transfer(rows: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Copy integer rows to ``device`` as int32 tensors, all in one transfer from pinned memory."""
    values: list[int] = []
    starts: list[int] = []
    for row in rows:
        starts.append(len(values))
        values.extend(row)
        values.extend([-1] * (-len(values) % _ALIGN))
    packed = torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    packed = packed.to(device, non_blocking=True)
    return [packed[start : start + len(row)] for start, row in zip(starts, rows, strict=True)]

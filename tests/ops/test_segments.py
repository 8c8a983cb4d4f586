"""The table of segments: what it holds, and every batch that it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_ops import ArgumentError, Segment, SegmentTable
from ckpt_ops.chunked import CHUNK


def build(*segments: Segment, num_slots: int = 8) -> SegmentTable:
    return SegmentTable.build(segments, num_slots, "cpu")


def test_contents() -> None:
    table = build(
        Segment(5, source=1, destination=0),
        Segment(0, destination=2),
        Segment(3, parent=0, destination=3),
        Segment(2, parent=1),
        Segment(1, parent=2),
    )
    assert table.cu_seqlens.tolist() == [0, 5, 5, 8, 10, 11]
    assert table.parents.tolist() == [-1, -1, 0, 1, 2]
    assert table.sources.tolist() == [1, -1, 0, 2, 3]  # a child's is its parent's destination
    assert table.destinations.tolist() == [0, 2, 3, -1, -1]
    assert table.phase_offsets == (0, 2, 4, 5)
    assert (table.num_segments, table.num_tokens, table.num_phases, table.num_slots) == (5, 11, 3, 8)
    for tensor in (table.cu_seqlens, table.parents, table.sources, table.destinations):
        assert tensor.dtype == torch.int32
        assert tensor.data_ptr() % 16 == 0


def test_narrow_integers_do_not_wrap() -> None:
    class Byte(int):
        """As numpy's: sums stay in 8 bits."""

        def __add__(self, other: int) -> Byte:
            return Byte((int(self) + int(other)) % 256)

        __radd__ = __add__

    assert build(Segment(Byte(200)), Segment(Byte(200))).cu_seqlens.tolist() == [0, 200, 400]


def test_one_phase_and_none_look_like_two() -> None:
    assert build(Segment(1), Segment(2)).phase_offsets == (0, 2, 2)
    empty = build()
    assert (empty.phase_offsets, empty.num_phases, empty.num_tokens) == ((0, 0, 0), 0, 0)
    assert empty.cu_seqlens.tolist() == [0]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(-1)], r"segments\[0\]\.length must be at least 0, got -1"),
        ([Segment(1, parent=0)], r"segments\[0\]\.parent must be -1 or the index of an earlier segment"),
        ([Segment(1, parent=-2)], r"segments\[0\]\.parent"),
        ([Segment(1, destination=0), Segment(1, parent=2), Segment(1)], r"segments\[1\]\.parent.*got 2"),
        ([Segment(1, destination=0), Segment(1, parent=0, source=1)], "both parent 0 and source 1"),
        ([Segment(1, source=8)], r"segments\[0\]\.source must be -1 or a slot from 0 to 7, got 8"),
        ([Segment(1, source=-2)], r"segments\[0\]\.source"),
        ([Segment(1, destination=8)], r"segments\[0\]\.destination must be -1 or a slot from 0 to 7, got 8"),
        ([Segment(1, destination=0), Segment(1, parent=0), Segment(1)], "sorted by depth"),
        ([Segment(1, destination=3), Segment(1, destination=3)], "both have destination 3"),
        ([Segment(1, destination=3), Segment(1, parent=0, destination=3)], "both have destination 3"),
        ([Segment(1), Segment(1, parent=0)], r"segments\[0\] has children, so its destination must be a slot"),
        ([Segment(1, source=2, destination=2), Segment(1, parent=0)], "source and destination must differ"),
        ([Segment(1, destination=2), Segment(1, source=2)], r"segments\[1\]\.source 2 is the destination"),
        ([Segment(1, source=2), Segment(1, destination=2)], r"segments\[0\]\.source 2 is the destination"),
        ([Segment(2**31)], "a batch holds at most"),
    ],
)
def test_refused(segments: list[Segment], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(*segments)


def test_negative_pool() -> None:
    with pytest.raises(ArgumentError, match="num_slots must be at least 0"):
        SegmentTable.build([], -1, "cpu")


def test_in_place_without_children_is_allowed() -> None:
    assert build(Segment(1, source=2, destination=2)).destinations.tolist() == [2]


def test_sources_may_repeat() -> None:
    assert build(Segment(1, source=2), Segment(1, source=2)).sources.tolist() == [2, 2]


def test_from_cu_seqlens() -> None:
    table = SegmentTable.from_cu_seqlens([0, 57, 59, 64], 4, "cpu", sources=[-1, 0, -1], destinations=[1, 2, -1])
    assert table.cu_seqlens.tolist() == [0, 57, 59, 64]
    assert table.sources.tolist() == [-1, 0, -1]
    assert table.destinations.tolist() == [1, 2, -1]


@pytest.mark.parametrize(
    ("cu_seqlens", "slots", "message"),
    [
        ([0, 5, 3], None, r"cu_seqlens must never decrease, but cu_seqlens\[2\] = 3 follows 5"),
        ([1, 5], None, "cu_seqlens must start with 0"),
        ([], None, "cu_seqlens must start with 0"),
        ([0, 5], [0, 1], "sources must have one slot for each of 1 sequences, got 2"),
    ],
)
def test_bad_cu_seqlens(cu_seqlens: list[int], slots: list[int] | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SegmentTable.from_cu_seqlens(cu_seqlens, 4, "cpu", sources=slots)


@given(st.lists(st.integers(0, 200), max_size=40))
def test_chunk_indices_do_not_collide(lengths: list[int]) -> None:
    """The kernels' rule: segment n owns the chunk indices from ``cu[n] // 64 + n``, at least one each, all below
    ``T // 64 + N``."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    firsts = [bound // CHUNK + index for index, bound in enumerate(bounds)]
    for index, length in enumerate(lengths):
        assert firsts[index] + max(1, -(-length // CHUNK)) <= firsts[index + 1]
    assert firsts[-1] == bounds[-1] // CHUNK + len(lengths)

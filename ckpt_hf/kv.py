"""Rows of the key/value pools and the tree of segments that own them.

A segment holds the rows of one stretch of tokens: the tokens between two boundaries, or those of a running request
after its last boundary. A segment continues its parent, so the keys that a token may attend to are the rows on the
path from the root to the token's own segment. A prefix is therefore stored once, whatever the number of its children.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

from .errors import CheckpointRuntimeError


class KVSegment:
    """Rows of consecutive tokens; ``refs`` counts its holders (checkpoints, requests and child segments).

    ``kept`` counts the ready checkpoints that end here and the children that are kept themselves.
    """

    __slots__ = ("kept", "parent", "refs", "rows")

    def __init__(self, parent: KVSegment | None) -> None:
        self.parent = parent
        self.refs = 1
        self.kept = 0
        self.rows = array("q")

    def __len__(self) -> int:
        return len(self.rows)

    def path(self) -> list[KVSegment]:
        """The segments from the root down to this one."""
        path: list[KVSegment] = []
        segment: KVSegment | None = self
        while segment is not None:
            path.append(segment)
            segment = segment.parent
        return path[::-1]


class KVRows:
    """Allocates rows to segments, contiguously where it can, and frees them with the last reference."""

    def __init__(self) -> None:
        self._free_starts: list[int] = []
        self._free_stops: list[int] = []
        self._segments: set[KVSegment] = set()
        self._used = 0
        self.high_water = 0

    @property
    def used(self) -> int:
        """Number of rows that belong to a segment."""
        return self._used

    @property
    def segments(self) -> frozenset[KVSegment]:
        """All live segments."""
        return frozenset(self._segments)

    def new_segment(self, parent: KVSegment | None) -> KVSegment:
        """An empty segment after ``parent``; the caller holds its first reference."""
        if parent is not None:
            self.retain(parent)
        segment = KVSegment(parent)
        self._segments.add(segment)
        return segment

    def retain(self, segment: KVSegment) -> None:
        """Add one holder to ``segment``."""
        if segment not in self._segments:
            raise CheckpointRuntimeError("a key/value segment was retained after its last release")
        segment.refs += 1

    def release(self, segment: KVSegment) -> None:
        """Drop one holder; the last one frees the rows and lets go of the parent."""
        current: KVSegment | None = segment
        while current is not None:
            if current not in self._segments:
                raise CheckpointRuntimeError("a key/value segment was released more often than retained")
            current.refs -= 1
            if current.refs:
                return
            self._segments.remove(current)
            self._used -= len(current.rows)
            self._free(current.rows)
            current = current.parent

    def extend(self, segment: KVSegment, count: int) -> None:
        """Append ``count`` rows to ``segment``."""
        self._used += count
        if count == 1:  # each answer, in each step
            segment.rows.append(self._take_one())
            return
        while count:
            start, stop = self._take(count)
            segment.rows.extend(range(start, stop))
            count -= stop - start

    def compact(self) -> array[int]:
        """Renumber all owned rows to 0, 1, 2, ..., each segment contiguous.

        Returns:
            The old row of each new row.
        """
        old_rows = array("q")
        for segment in self._segments:
            start = len(old_rows)
            old_rows.extend(segment.rows)
            segment.rows = array("q", range(start, len(old_rows)))
        self._free_starts, self._free_stops = [], []
        self.high_water = len(old_rows)
        return old_rows

    def trim(self) -> None:
        """Forget free rows above the highest owned one, so that the pools need not be as large."""
        if self._free_stops and self._free_stops[-1] == self.high_water:
            self.high_water = self._free_starts.pop()
            self._free_stops.pop()

    def check_integrity(self) -> None:
        """Raise CheckpointRuntimeError unless every row is either free or in exactly one segment."""
        owned = [row for segment in self._segments for row in segment.rows]
        free = [r for a, b in zip(self._free_starts, self._free_stops, strict=True) for r in range(a, b)]
        if len(owned) != self._used:
            raise CheckpointRuntimeError(f"{len(owned)} key/value rows are owned, but {self._used} are counted")
        if sorted(owned + free) != list(range(self.high_water)):
            raise CheckpointRuntimeError("key/value rows are lost, shared or owned twice")
        children: dict[KVSegment, int] = {}
        for segment in self._segments:
            if segment.parent is not None:
                children[segment.parent] = children.get(segment.parent, 0) + 1
        for segment, count in children.items():
            if segment not in self._segments or segment.refs < count:
                raise CheckpointRuntimeError("a key/value segment was freed while a child still continues it")

    def _take_one(self) -> int:
        """The lowest free row."""
        if not self._free_starts:
            self.high_water += 1
            return self.high_water - 1
        row = self._free_starts[0]
        if row + 1 == self._free_stops[0]:
            del self._free_starts[0], self._free_stops[0]
        else:
            self._free_starts[0] = row + 1
        return row

    def _take(self, count: int) -> tuple[int, int]:
        """A contiguous range of at most ``count`` free rows: a hole that fits, else new rows, never a split hole."""
        for i, (start, stop) in enumerate(zip(self._free_starts, self._free_stops, strict=True)):
            if stop - start >= count:
                if stop - start == count:
                    del self._free_starts[i], self._free_stops[i]
                else:
                    self._free_starts[i] = start + count
                return start, start + count
        if self._free_starts:
            start, stop = self._free_starts[0], self._free_stops[0]
            if stop != self.high_water and stop - start >= count // 8 + 1:
                del self._free_starts[0], self._free_stops[0]
                return start, stop
        start = self.high_water
        self.high_water += count
        return start, start + count

    def _free(self, rows: array[int]) -> None:
        ordered = sorted(rows)
        parts = [(0, len(ordered))] if ordered else []
        while parts:
            # Halved until it has no gap: most segments are a few long runs.
            first, stop = parts.pop()
            if ordered[stop - 1] - ordered[first] == stop - 1 - first:
                self._free_range(ordered[first], ordered[stop - 1] + 1)
            else:
                middle = (first + stop) // 2
                parts += [(first, middle), (middle, stop)]

    def _free_range(self, start: int, stop: int) -> None:
        at = bisect_left(self._free_starts, start)
        if at < len(self._free_starts) and self._free_starts[at] == stop:
            stop = self._free_stops[at]
            del self._free_starts[at], self._free_stops[at]
        if at and self._free_stops[at - 1] == start:
            self._free_stops[at - 1] = stop
        else:
            self._free_starts.insert(at, start)
            self._free_stops.insert(at, stop)

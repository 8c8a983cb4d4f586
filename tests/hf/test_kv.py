"""Rows of the key/value pools: the tree of segments, reference counts, reuse and compaction."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckpt_hf.errors import CheckpointRuntimeError
from ckpt_hf.kv import KVRows, KVSegment


def segment(rows: KVRows, count: int, parent: KVSegment | None = None) -> KVSegment:
    made = rows.new_segment(parent)
    rows.extend(made, count)
    return made


def test_path_runs_from_root_to_leaf() -> None:
    rows = KVRows()
    root = segment(rows, 3)
    child = segment(rows, 2, root)
    leaf = segment(rows, 1, child)
    assert leaf.path() == [root, child, leaf]
    assert [list(s.rows) for s in leaf.path()] == [[0, 1, 2], [3, 4], [5]]
    assert (len(root), root.refs, child.refs, leaf.refs) == (3, 2, 2, 1)


def test_prefix_lives_as_long_as_a_child() -> None:
    rows = KVRows()
    root = segment(rows, 4)
    first, second = segment(rows, 2, root), segment(rows, 2, root)
    rows.release(root)
    rows.release(first)
    assert rows.segments == {root, second}
    assert rows.used == 6
    rows.release(second)
    assert rows.segments == frozenset()
    assert rows.used == 0
    rows.check_integrity()


def test_last_release_frees_a_whole_chain() -> None:
    rows = KVRows()
    tip = None
    for _ in range(3000):  # deeper than the recursion limit
        made = segment(rows, 1, tip)
        if tip is not None:
            rows.release(tip)
        tip = made
    assert tip is not None
    assert len(tip.path()) == rows.used == 3000
    rows.release(tip)
    assert rows.used == 0


def test_retain_and_release_after_the_end() -> None:
    rows = KVRows()
    gone = segment(rows, 1)
    rows.retain(gone)
    rows.release(gone)
    rows.release(gone)
    with pytest.raises(CheckpointRuntimeError, match="released more often than retained"):
        rows.release(gone)
    with pytest.raises(CheckpointRuntimeError, match="retained after its last release"):
        rows.retain(gone)
    with pytest.raises(CheckpointRuntimeError, match="retained after its last release"):
        rows.new_segment(gone)
    rows.check_integrity()


def test_freed_rows_are_used_again_and_kept_contiguous() -> None:
    rows = KVRows()
    parts = [segment(rows, 8) for _ in range(4)]
    for part in (parts[0], parts[2], parts[1]):  # the middle one joins its neighbours into one hole
        rows.release(part)
    assert list(segment(rows, 24).rows) == list(range(24))
    assert rows.high_water == 32


def test_large_request_does_not_fill_crumbs_first() -> None:
    rows = KVRows()
    parts = [segment(rows, 1) for _ in range(6)]
    for part in parts[::2]:
        rows.release(part)
    assert list(segment(rows, 64).rows) == list(range(6, 70))
    assert list(segment(rows, 1).rows) == [0]


def test_extending_nothing() -> None:
    rows = KVRows()
    assert len(segment(rows, 0)) == rows.high_water == 0


def test_integrity_sees_shared_rows_and_freed_parents() -> None:
    rows = KVRows()
    root = segment(rows, 2)
    child = segment(rows, 2, root)
    rows.check_integrity()
    child.rows[0] = 0
    with pytest.raises(CheckpointRuntimeError, match="lost, shared or owned twice"):
        rows.check_integrity()
    child.rows[0] = 2
    root.refs = 0
    with pytest.raises(CheckpointRuntimeError, match="freed while a child still continues it"):
        rows.check_integrity()


class KVMachine(RuleBasedStateMachine):
    """Every token written through a segment is read back through it, whatever happens to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVRows()
        self.holders: list[KVSegment] = []
        self.tokens: dict[KVSegment, list[int]] = {}
        self.pool: dict[int, int] = {}
        self.clock = 0

    def pick(self, data: st.DataObject) -> KVSegment:
        return self.holders[data.draw(st.integers(0, len(self.holders) - 1))]

    @rule(data=st.data(), continues=st.booleans())
    def open_segment(self, data: st.DataObject, continues: bool) -> None:
        parent = self.pick(data) if continues and self.holders else None
        made = self.kv.new_segment(parent)
        self.holders.append(made)
        self.tokens[made] = []

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(0, 20))
    def extend(self, data: st.DataObject, count: int) -> None:
        grown = self.pick(data)
        before = list(grown.rows)
        self.kv.extend(grown, count)
        assert list(grown.rows[: len(before)]) == before
        for row in grown.rows[len(before) :]:
            self.clock += 1
            self.pool[row] = self.clock
            self.tokens[grown].append(self.clock)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        held = self.pick(data)
        self.kv.retain(held)
        self.holders.append(held)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.pick(data)
        self.holders.remove(held)
        self.kv.release(held)

    @rule()
    def compact(self) -> None:
        self.pool = {new: self.pool[old] for new, old in enumerate(self.kv.compact())}
        assert self.kv.high_water == self.kv.used

    @invariant()
    def reads_what_was_written(self) -> None:
        self.kv.check_integrity()
        alive = {part for held in self.holders for part in held.path()}
        assert self.kv.segments == alive
        assert self.kv.used == sum(map(len, alive)) <= self.kv.high_water
        for part in alive:
            assert [self.pool[row] for row in part.rows] == self.tokens[part]

    def teardown(self) -> None:
        for held in self.holders:
            self.kv.release(held)
        assert self.kv.used == 0
        self.kv.check_integrity()


TestKVMachine: Any = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)

"""Slot numbers and their owners."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_hf.errors import CheckpointRuntimeError
from ckpt_hf.slots import SlotAllocator


def test_lowest_free_slot_first() -> None:
    slots = SlotAllocator()
    assert [slots.acquire(name) for name in "abcd"] == [0, 1, 2, 3]
    slots.release(2, "c")
    slots.release(0, "a")
    assert [slots.acquire(name) for name in "efg"] == [0, 2, 4]
    assert [slots.owner(slot) for slot in range(6)] == ["e", "b", "f", "d", "g", None]
    assert (slots.used, slots.high_water) == (5, 5)


@pytest.mark.parametrize(
    ("slot", "owner"), [(0, "b"), (0, 1), (1, "a"), (7, "a")], ids=["other", "type", "free", "never handed out"]
)
def test_only_the_owner_releases(slot: int, owner: object) -> None:
    slots = SlotAllocator()
    slots.acquire("a")
    slots.release(slots.acquire("b"), "b")
    with pytest.raises(CheckpointRuntimeError, match=f"slot {slot} belongs to"):
        slots.release(slot, owner)
    slots.check_integrity(["a"])


def test_released_twice() -> None:
    slots = SlotAllocator()
    slots.release(slots.acquire("a"), "a")
    with pytest.raises(CheckpointRuntimeError, match="slot 0 belongs to None, not to 'a'"):
        slots.release(0, "a")
    assert slots.acquire("b") == 0


def test_compact_keeps_order_and_owners() -> None:
    slots = SlotAllocator()
    for name in "abcde":
        slots.acquire(name)
    for slot, name in ((0, "a"), (3, "d")):
        slots.release(slot, name)
    assert list(slots.compact().items()) == [(1, 0), (2, 1), (4, 2)]
    assert [slots.owner(slot) for slot in range(3)] == ["b", "c", "e"]
    assert slots.high_water == 3
    assert slots.acquire("f") == 3
    slots.check_integrity("bcef")


@pytest.mark.parametrize("expected", ["", "a", "aa", "abc", "ac"])
def test_integrity_names_a_wrong_owner(expected: str) -> None:
    slots = SlotAllocator()
    slots.acquire("a")
    slots.acquire("b")
    slots.check_integrity("ba")
    with pytest.raises(CheckpointRuntimeError, match="slots are owned by"):
        slots.check_integrity(expected)


def test_integrity_sees_lost_and_doubled_slots() -> None:
    slots = SlotAllocator()
    slots.acquire("a")
    slots.release(slots.acquire("b"), "b")
    slots._free.append(0)
    with pytest.raises(CheckpointRuntimeError, match="both free and owned"):
        slots.check_integrity("a")
    slots._free[:] = [1, 1]
    with pytest.raises(CheckpointRuntimeError, match="free twice"):
        slots.check_integrity("a")
    slots._free.clear()
    with pytest.raises(CheckpointRuntimeError, match="neither free nor owned"):
        slots.check_integrity("a")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.none(), st.just("compact"), st.integers(0, 20)), max_size=60))
def test_against_a_dictionary(actions: list[int | str | None]) -> None:
    """None acquires, a number releases one of the owned slots."""
    slots = SlotAllocator()
    owners: dict[int, int] = {}
    for owner, action in enumerate(actions):
        if action is None:
            slot = slots.acquire(owner)
            assert slot == min(set(range(len(owners) + 1)) - owners.keys())
            owners[slot] = owner
        elif action == "compact":
            moved = slots.compact()
            assert sorted(moved) == sorted(owners)
            owners = {moved[slot]: name for slot, name in owners.items()}
            assert sorted(owners) == list(range(len(owners)))
        elif owners:
            slot = sorted(owners)[int(action) % len(owners)]
            slots.release(slot, owners.pop(slot))
        assert {slot: slots.owner(slot) for slot in range(slots.high_water)} == {
            slot: owners.get(slot) for slot in range(slots.high_water)
        }
        slots.check_integrity(owners.values())

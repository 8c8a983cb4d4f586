"""Numbers of the rows in the state pools, and who owns each of them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

from .errors import CheckpointRuntimeError


class SlotAllocator:
    """Hands out slot numbers, the lowest free one first, and remembers their owners.

    The allocator has no upper limit of its own: what is kept between calls is limited by the checkpoint index, and
    what runs at once by the caller. ``high_water`` tells the pools how many rows they need.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._owners: dict[int, Hashable] = {}
        self.high_water = 0

    def acquire(self, owner: Hashable) -> int:
        """Give ``owner`` a free slot. Its content is whatever the last owner left there."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self.high_water
            self.high_water += 1
        self._owners[slot] = owner
        return slot

    def release(self, slot: int, owner: Hashable) -> None:
        """Take ``slot`` back.

        Raises:
            CheckpointRuntimeError: ``slot`` does not belong to ``owner``.
        """
        if self._owners.get(slot) != owner:
            raise CheckpointRuntimeError(
                f"slot {slot} belongs to {self._owners.get(slot)!r}, not to {owner!r}, which tried to release it"
            )
        del self._owners[slot]
        heapq.heappush(self._free, slot)

    def transfer(self, slot: int, owner: Hashable, new_owner: Hashable) -> None:
        """Hand ``slot`` with its content from ``owner`` to ``new_owner``.

        Raises:
            CheckpointRuntimeError: ``slot`` does not belong to ``owner``.
        """
        if self._owners.get(slot) != owner:
            raise CheckpointRuntimeError(
                f"slot {slot} belongs to {self._owners.get(slot)!r}, {owner!r} cannot hand it on"
            )
        self._owners[slot] = new_owner

    def owner(self, slot: int) -> Hashable | None:
        """The owner of ``slot``, or None when it is free."""
        return self._owners.get(slot)

    @property
    def used(self) -> int:
        """Number of slots that have an owner."""
        return len(self._owners)

    def compact(self) -> dict[int, int]:
        """Renumber the owned slots to 0, 1, 2, ... and forget the free ones.

        Returns:
            New number of each owned slot by its old number, in the order of the new numbers.
        """
        renumbered = {old: new for new, old in enumerate(sorted(self._owners))}
        self._owners = {renumbered[old]: owner for old, owner in self._owners.items()}
        self._free = []
        self.high_water = len(self._owners)
        return renumbered

    def trim(self) -> None:
        """Forget free slots above the highest owned one, so that the pools need not be as large."""
        self.high_water = 1 + max(self._owners, default=-1)
        self._free = [slot for slot in self._free if slot < self.high_water]
        heapq.heapify(self._free)

    def check_integrity(self, expected_owners: Iterable[Hashable]) -> None:
        """Raise CheckpointRuntimeError unless the slots' owners are exactly ``expected_owners``."""
        expected = sorted(map(repr, expected_owners))
        actual = sorted(map(repr, self._owners.values()))
        if expected != actual:
            raise CheckpointRuntimeError(f"slots are owned by {actual}, expected {expected}")
        if set(self._free) & set(self._owners) or len(set(self._free)) != len(self._free):
            raise CheckpointRuntimeError("a slot is both free and owned, or free twice")
        if len(self._free) + len(self._owners) != self.high_water:
            raise CheckpointRuntimeError("a slot is neither free nor owned")

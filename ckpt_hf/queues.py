"""Requests that wait, grouped by the checkpoint that they share, so that a step looks at none in vain.

A group is closed while somebody computes its checkpoint: all of it waits, and all of it wakes, in one move. The next
request to start is the head of the best open group, whatever the number of those that wait.
"""

from __future__ import annotations

import heapq

from .requests import Request


class Group:
    """Requests that share ``key``, best rank first. Those that left are dropped when they come up."""

    __slots__ = ("closed", "heap", "key", "members")

    def __init__(self, key: bytes | None, closed: bool) -> None:
        self.key = key
        self.closed = closed
        self.members: dict[int, Request] = {}
        self.heap: list[tuple[tuple[int, int, int], int, Request]] = []

    def head(self) -> Request | None:
        """The best request, or None."""
        while self.heap:
            request = self.heap[0][-1]
            if self.members.get(request.request_id) is request:
                return request
            heapq.heappop(self.heap)
        return None


class WaitingRoom:
    """Groups of waiting requests and the order between their heads."""

    def __init__(self) -> None:
        self._groups: dict[bytes | None, Group] = {}
        self._heads: list[tuple[tuple[int, int, int], int, Group]] = []
        self._places: dict[int, Group] = {}
        self._entries = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: Request) -> bool:
        place = self._places.get(request.request_id)
        return place is not None and place.members.get(request.request_id) is request

    def put(self, request: Request, key: bytes | None, closed: bool) -> None:
        """``request`` waits with those who share ``key`` (None: it shares nothing).

        Args:
            request: not waiting yet.
            key: of the checkpoint that it will start from.
            closed: whether somebody computes that checkpoint; counts if it is the first to wait for it.
        """
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, closed)
        self._entries += 1
        heapq.heappush(group.heap, (request.rank, self._entries, request))
        group.members[request.request_id] = request
        self._places[request.request_id] = group
        if group.head() is request:
            self._announce(group)

    def remove(self, request: Request) -> None:
        """``request`` starts or ends."""
        group = self._places.pop(request.request_id)
        was_head = group.head() is request
        del group.members[request.request_id]
        if not group.members:
            del self._groups[group.key]
            group.heap.clear()
        elif was_head:
            self._announce(group)
        elif len(group.heap) > 64 + 2 * len(group.members):
            group.heap = [(r.rank, i, r) for i, r in enumerate(group.members.values())]
            heapq.heapify(group.heap)

    def close(self, key: bytes) -> Group | None:
        """Somebody computes the checkpoint: its group waits. Returns the group if it did not wait already."""
        group = self._groups.get(key)
        if group is None or group.closed:
            return None
        group.closed = True
        return group

    def open(self, key: bytes) -> None:
        """The checkpoint is there, or nobody computes it any more."""
        group = self._groups.get(key)
        if group is not None and group.closed:
            group.closed = False
            self._announce(group)

    def group(self, key: bytes) -> Group | None:
        """Those who share ``key``, or None."""
        return self._groups.get(key)

    def first(self) -> Request | None:
        """The best request of an open group, or None."""
        while self._heads:
            rank, _, group = self._heads[0]
            request = None if group.closed else group.head()
            if request is not None and request.rank == rank:
                return request
            heapq.heappop(self._heads)
        return None

    def _announce(self, group: Group) -> None:
        """Enter the group's head in the order of heads; its older entries die when they come up."""
        head = None if group.closed else group.head()
        if head is not None:
            self._entries += 1
            heapq.heappush(self._heads, (head.rank, self._entries, group))

"""A reentrant lock that is handed over in order of arrival.

Python's own locks let a thread that releases and takes one in a loop, as an engine does round its steps, keep everybody
else out for good.
"""

from __future__ import annotations

import threading
from collections import deque


class TurnLock:
    """Mutual exclusion, reentrant, first come first served. Use it as a context manager."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._turns: deque[tuple[int, threading.Lock]] = deque()
        self._owner: int | None = None
        self._depth = 0

    @property
    def held(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> TurnLock:
        me = threading.get_ident()
        with self._guard:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return self
            turn = threading.Lock()
            turn.acquire()
            self._turns.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # an interrupt while waiting
            self._give_up(me, turn)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._depth -= 1
            if not self._depth:
                self._hand_over()

    def _hand_over(self) -> None:
        self._owner = None
        if self._turns:
            self._owner, turn = self._turns.popleft()
            self._depth = 1
            turn.release()

    def _give_up(self, me: int, turn: threading.Lock) -> None:
        with self._guard:
            if (me, turn) in self._turns:
                self._turns.remove((me, turn))
            else:  # the turn had come just before
                self._depth = 0
                self._hand_over()

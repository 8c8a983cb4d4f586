"""Engines that are open in this process: closed when it ends, given up in a child that it forks."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class OpenEngine(Protocol):
    """What this file needs of an engine."""

    def close(self, drain: bool = False) -> None:
        """End its thread."""

    def give_up(self) -> None:
        """Refuse everything from now on, without its thread and its locks."""


_OPEN: weakref.WeakSet[OpenEngine] = weakref.WeakSet()


def remember(engine: OpenEngine) -> None:
    """The engine's thread has started."""
    _OPEN.add(engine)


def forget(engine: OpenEngine) -> None:
    """The engine's thread has ended."""
    _OPEN.discard(engine)


@atexit.register
def _close_all() -> None:
    """A thread that runs a model while the interpreter ends would crash it."""
    for engine in list(_OPEN):
        engine.close()


def _give_up_all() -> None:
    """A forked child has no copy of the threads, and their locks may stay taken for ever."""
    for engine in list(_OPEN):
        engine.give_up()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_all)

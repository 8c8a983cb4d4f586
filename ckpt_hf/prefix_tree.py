"""The prefixes that prompts share: the branching points of the radix tree of their token ids, from a sorted list."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, slots=True)
class SharedPrefix:
    """A prefix after which prompts differ or end.

    Attributes:
        tokens: its length.
        first, last: the prompts that begin with it, as a range of the sorted order (``last`` included).
        parent: the next shorter shared prefix of the same prompts, or None.
        children: the shared prefixes that continue this one.
    """

    tokens: int
    first: int
    last: int
    parent: SharedPrefix | None = None
    children: list[SharedPrefix] = field(default_factory=list)

    @property
    def prompts(self) -> int:
        """Number of prompts that begin with it."""
        return self.last - self.first + 1

    @property
    def parent_tokens(self) -> int:
        """Length of the parent, 0 without one."""
        return self.parent.tokens if self.parent is not None else 0


def sort_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Order prompts by their token ids (0 to 2**32 - 1).

    Returns:
        Indices of the prompts in order, and for each neighbouring pair the number of tokens that they share.
    """
    rows = [np.asarray(ids, dtype=">u4") for ids in prompts]
    # Big-endian bytes compare as the ids do, in one memcmp.
    order = sorted(range(len(rows)), key=lambda i: rows[i].tobytes())
    return order, [_common(rows[a], rows[b]) for a, b in itertools.pairwise(order)]


def shared_prefixes(common: Sequence[int]) -> list[SharedPrefix]:
    """The tree over prompts in sorted order, ``common`` as :func:`sort_prompts` gives it; parents before children."""
    found: list[SharedPrefix] = []
    stack: list[SharedPrefix] = []
    for i, tokens in enumerate([*common, 0]):
        first, closed = i, None
        while stack and stack[-1].tokens > tokens:
            closed = stack.pop()
            closed.last, first = i, closed.first
            found.append(closed)
            if stack and stack[-1].tokens >= tokens:
                _adopt(stack[-1], closed)
                closed = None
        if tokens and (not stack or stack[-1].tokens < tokens):
            stack.append(SharedPrefix(tokens, first, i))
            if closed is not None:
                _adopt(stack[-1], closed)
    return found[::-1]


def _adopt(parent: SharedPrefix, child: SharedPrefix) -> None:
    child.parent = parent
    parent.children.append(child)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length

"""Which of the shared prefixes are worth a checkpoint.

With a checkpoint at each of a set of prefixes, the tokens between a prefix and the next shorter one of the set are
computed once instead of once a prompt. A prefix is worth no more than what the others would not save without it, so
the choice starts from all of them and takes away, one at a time, the one that adds least.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from .prefix_tree import SharedPrefix


def saved_tokens(prefix: SharedPrefix) -> int:
    """Tokens between ``prefix`` and its parent that need not be computed again."""
    return (prefix.prompts - 1) * (prefix.tokens - prefix.parent_tokens)


def added_tokens(prefix: SharedPrefix) -> int:
    """Tokens that are saved with ``prefix`` and not without it."""
    elsewhere = sum(child.prompts - 1 for child in prefix.children)
    return (prefix.prompts - 1 - elsewhere) * (prefix.tokens - prefix.parent_tokens)


def remove(prefix: SharedPrefix, prefixes: set[SharedPrefix]) -> list[SharedPrefix]:
    """Take ``prefix`` out of the tree; its children go to its parent. Returns those whose worth has changed."""
    prefixes.discard(prefix)
    for child in prefix.children:
        child.parent = prefix.parent
    if prefix.parent is None:
        return prefix.children
    prefix.parent.children.remove(prefix)
    prefix.parent.children.extend(prefix.children)
    return [prefix.parent, *prefix.children]


def choose_boundaries(
    prefixes: Iterable[SharedPrefix],
    min_saved: int,
    cost: Callable[[SharedPrefix], int],
    max_cost: int | None = None,
) -> list[SharedPrefix]:
    """The prefixes that pay; the tree is changed to hold only these.

    Args:
        prefixes: the tree, parents before children.
        min_saved: tokens that each chosen one must add.
        cost: bytes of a checkpoint at a prefix, on top of one at its parent.
        max_cost: bytes that all together may take; None for any number.

    Returns:
        The chosen ones, parents before children.
    """
    order = list(prefixes)
    kept = set(order)
    _thin(kept, added_tokens, lambda worth: worth < min_saved)
    if max_cost is not None:
        left = max_cost - sum(map(cost, kept))

        def take(prefix: SharedPrefix) -> None:
            nonlocal left
            left += cost(prefix) + sum(map(cost, prefix.children))

        def put_back(children: list[SharedPrefix]) -> None:
            nonlocal left
            left -= sum(map(cost, children))

        _thin(kept, lambda prefix: added_tokens(prefix) / max(cost(prefix), 1), lambda _: left < 0, take, put_back)
    return [prefix for prefix in order if prefix in kept]


def _thin(
    kept: set[SharedPrefix],
    worth_of: Callable[[SharedPrefix], float],
    goes_on: Callable[[float], bool],
    before: Callable[[SharedPrefix], None] = lambda prefix: None,
    after: Callable[[list[SharedPrefix]], None] = lambda children: None,
) -> None:
    """Remove the least worthy while ``goes_on`` says so of its worth; entries whose worth has changed are stale."""
    heap = [(worth_of(prefix), -prefix.tokens, prefix.first, prefix) for prefix in kept]
    heapq.heapify(heap)
    while heap and goes_on(heap[0][0]):
        worth, _, _, prefix = heapq.heappop(heap)
        if prefix not in kept or worth != worth_of(prefix):
            continue
        before(prefix)
        for changed in remove(prefix, kept):
            heapq.heappush(heap, (worth_of(changed), -changed.tokens, changed.first, changed))
        after(prefix.children)

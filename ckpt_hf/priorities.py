"""Who comes first: priority, the order of arrival, and fairness between anchors, in one number that never changes.

    score = step of arrival + 16 x batches of its own anchor ahead of it - 64 x priority

The smallest score runs first; among equals the requests of one anchor stay together. Since the score of whoever arrives
later grows with the steps, a request is overtaken by a bounded number of others and nobody starves; and a page with ten
thousand candidates does not keep away one that arrives after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .requests import Request

Rank: TypeAlias = tuple[int, int, int]

STEPS_A_PRIORITY = 64
STEPS_A_BATCH = 16


@dataclass(slots=True)
class _Anchor:
    first: int
    tokens: int = 0
    requests: int = 0


class Ranking:
    """Gives requests their rank on arrival. An anchor is what requests share: the prefix up to their first boundary."""

    def __init__(self) -> None:
        self._anchors: dict[bytes, _Anchor] = {}
        self._arrivals = 0
        self._entered: set[int] = set()

    def __len__(self) -> int:
        return len(self._anchors)

    def enter(self, request: Request, step: int, batch_tokens: int) -> None:
        """Set ``request.rank``.

        Args:
            request: waits from now on.
            step: number of the current step.
            batch_tokens: tokens of one step.
        """
        self._arrivals += 1
        score, first = step - STEPS_A_PRIORITY * request.priority, self._arrivals
        if request.keys:
            anchor = self._anchors.setdefault(request.keys[0], _Anchor(self._arrivals))
            score += STEPS_A_BATCH * (anchor.tokens // batch_tokens)
            first = anchor.first
            anchor.tokens += request.prompt_tokens - request.boundaries[0]
            anchor.requests += 1
        request.rank = (score, first, self._arrivals)
        self._entered.add(request.request_id)

    def leave(self, request: Request) -> None:
        """The request has its first tokens, or has ended: its anchor's others are that much nearer."""
        if request.request_id not in self._entered:
            return  # it waits again, after a preemption
        self._entered.remove(request.request_id)
        if request.keys:
            anchor = self._anchors[request.keys[0]]
            anchor.tokens -= request.prompt_tokens - request.boundaries[0]
            anchor.requests -= 1
            if not anchor.requests:
                del self._anchors[request.keys[0]]

"""What prompts have in common beyond the boundaries that they declare.

Token ids are kept as bytes (:func:`~ckpt_hf.keys.pack_tokens`) in sorted order, so the longest common prefix with any
of them is that with a neighbour.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice, takewhile

from .checkpoint import Checkpoint
from .keys import TOKEN_BYTES, KeyScope, pack_tokens

_RECENT_PROMPTS = 64
_NEIGHBOURS = 16
SEAM_TOKENS = 2
"""Tokens by which ids of one text may differ before a boundary, because of what follows it."""


class PrefixIndex:
    """Ready checkpoints and the latest prompts of each scope; one scope never learns of another's."""

    def __init__(self) -> None:
        self._scopes: dict[KeyScope, _Prefixes] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    def add(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is ready; one without a scope is ignored."""
        if checkpoint.scope is not None:
            prefixes = self._scopes.setdefault(checkpoint.scope, _Prefixes())
            checkpoint.packed = checkpoint.packed or pack_tokens(checkpoint.token_ids)
            prefixes.insert(checkpoint.packed, checkpoint)

    def remove(self, checkpoint: Checkpoint) -> None:
        """A checkpoint that was added is gone."""
        if checkpoint.scope is not None:
            prefixes = self._scopes[checkpoint.scope]
            prefixes.discard(checkpoint.packed, checkpoint)
            if not prefixes:
                del self._scopes[checkpoint.scope]

    def deepest(self, scope: KeyScope, packed: bytes) -> Checkpoint | None:
        """The ready checkpoint of the longest prefix of these tokens, declared there or not."""
        prefixes = self._scopes.get(scope)
        return None if prefixes is None else prefixes.deepest(packed)

    def overlap(self, scope: KeyScope, packed: bytes) -> int:
        """Tokens at the beginning that a ready checkpoint or a recent prompt of the scope has as well."""
        prefixes = self._scopes.get(scope)
        return 0 if prefixes is None else prefixes.overlap(packed)

    def ends_near(self, scope: KeyScope, packed: bytes, common: int) -> list[int]:
        """Lengths of ready checkpoints that leave these tokens after ``common`` of them and end right there."""
        prefixes = self._scopes.get(scope)
        return [] if prefixes is None else prefixes.ends_near(packed[: common * TOKEN_BYTES])

    def remember(self, scope: KeyScope, packed: bytes) -> None:
        """A prompt was computed; the latest ones of a scope are remembered while the scope has a checkpoint."""
        if (prefixes := self._scopes.get(scope)) is not None:
            prefixes.remember(packed)


class _Prefixes:
    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self._recent: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._checkpoints)

    def insert(self, packed: bytes, checkpoint: Checkpoint) -> None:
        if packed not in self._checkpoints and packed not in self._recent:
            insort(self._sorted, packed)
        self._checkpoints[packed] = checkpoint

    def discard(self, packed: bytes, checkpoint: Checkpoint) -> None:
        if self._checkpoints.get(packed) is checkpoint:
            del self._checkpoints[packed]
            self._drop(packed)

    def remember(self, packed: bytes) -> None:
        if self._recent.pop(packed, packed) is packed and packed not in self._checkpoints:
            insort(self._sorted, packed)
        self._recent[packed] = None
        if len(self._recent) > _RECENT_PROMPTS:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            self._drop(oldest)

    def overlap(self, packed: bytes) -> int:
        at = bisect_left(self._sorted, packed)
        return max((_common(packed, near) for near in self._sorted[max(at - 1, 0) : at + 1]), default=0)

    def ends_near(self, packed: bytes) -> list[int]:
        at = bisect_left(self._sorted, packed)
        limit = len(packed) + SEAM_TOKENS * TOKEN_BYTES
        near = takewhile(lambda other: other.startswith(packed), islice(self._sorted, at, at + _NEIGHBOURS))
        return [len(o) // TOKEN_BYTES for o in near if len(packed) < len(o) <= limit and o in self._checkpoints]

    def deepest(self, packed: bytes) -> Checkpoint | None:
        """Prefixes of ``packed`` sort before it; each neighbour that is none says how much shorter the next can be."""
        while packed:
            if (found := self._checkpoints.get(packed)) is not None:
                return found
            at = bisect_left(self._sorted, packed)
            if not at:
                return None
            packed = packed[: TOKEN_BYTES * _common(packed, self._sorted[at - 1])]
        return None

    def _drop(self, packed: bytes) -> None:
        if packed not in self._checkpoints and packed not in self._recent:
            del self._sorted[bisect_left(self._sorted, packed)]


def _common(first: bytes, second: bytes) -> int:
    """Leading tokens that are equal, found by halving: comparing bytes is far faster than looking at each token."""
    low, high = 0, min(len(first), len(second)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if first[: middle * TOKEN_BYTES] == second[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low

"""Token sequences as numbers, so that a state can be told from every other one at a glance."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_hf.index import Checkpoint
from ckpt_hf.requests import Request


class Histories:
    """Token sequences by number: two numbers are equal only when the sequences are, token for token."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._known: dict[Request | Checkpoint, list[int]] = {}

    def of(self, owner: Request | Checkpoint) -> list[int]:
        """Number of each prefix of the owner's tokens, which may have grown; the empty one, 0, comes first."""
        return self._extend(self._known.setdefault(owner, [0]), owner.token_ids)

    def prefixes(self, token_ids: Sequence[int]) -> list[int]:
        """The same for bare token ids."""
        return self._extend([0], token_ids)

    def _extend(self, known: list[int], token_ids: Sequence[int]) -> list[int]:
        for token in token_ids[len(known) - 1 :]:
            known.append(self._numbers.setdefault((known[-1], token), len(self._numbers) + 1))
        return known

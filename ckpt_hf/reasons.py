"""Why a part of a prompt that could have been reused was not."""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """One word for a user, one for each way to miss; equal to its text.

    ``OTHER_CALLER`` exists for the operator's trace alone: a caller reads it as ``NEVER_SEEN``, so that nobody learns
    from a reason what somebody else has sent.
    """

    NEVER_SEEN = "never seen"
    UNREADY = "unready"
    EVICTED = "evicted"
    OTHER_ADAPTER = "other adapter"
    SEAM = "seam"
    NO_BOUNDARY = "no boundary there"
    OTHER_CALLER = "other caller"

    def __str__(self) -> str:
        return self.value

    @property
    def explanation(self) -> str:
        """A sentence on what happened and what would change it."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    Reason.NEVER_SEEN: "no earlier prompt had a checkpoint at the end of exactly these tokens",
    Reason.UNREADY: "another request was still computing the checkpoint, and it was not worth waiting for",
    Reason.EVICTED: "the checkpoint existed and was evicted; raise cache_bytes or pin it",
    Reason.OTHER_ADAPTER: "the same tokens have a checkpoint of other weights or of another adapter",
    Reason.SEAM: "a checkpoint ends here whose last tokens alone are others: the text differs there, or tokens merge "
    "with what follows; end the shared part at a newline or use ckpt_hf.encode",
    Reason.NO_BOUNDARY: "the tokens were computed before, but no boundary was declared there",
    Reason.OTHER_CALLER: "the same tokens have a checkpoint under another salt",
}


def for_caller(reason: str) -> str:
    """``reason`` as it may be told to the caller of the request."""
    return Reason.NEVER_SEEN.value if reason == Reason.OTHER_CALLER else str(reason)

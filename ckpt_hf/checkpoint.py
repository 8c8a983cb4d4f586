"""One checkpoint: its states, who computes it, and how long it is worth keeping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from .errors import CheckpointRuntimeError
from .keys import KeyScope
from .kv import KVSegment


class CheckpointStatus(Enum):
    """States of a checkpoint; ``ABSENT`` is the state of one that left the index."""

    UNREADY = "unready"
    READY = "ready"
    ABSENT = "absent"


CHECKPOINT_TRANSITIONS = {
    CheckpointStatus.UNREADY: {CheckpointStatus.READY, CheckpointStatus.ABSENT},
    CheckpointStatus.READY: {CheckpointStatus.ABSENT},
    CheckpointStatus.ABSENT: set(),
}


class Retention(IntEnum):
    """How long a checkpoint stays when memory is short; smaller ones go first.

    ``EPHEMERAL`` serves the requests that wait for it and is not kept after them. ``SOFT`` ones are ends of turns that
    nobody declared. ``DECLARED`` ones outlive both.
    """

    EPHEMERAL = 0
    SOFT = 1
    DECLARED = 2


@dataclass(eq=False, slots=True)
class Checkpoint:
    """Everything needed to go on after ``token_ids``.

    While it is unready it is a lease: ``producer`` is its owner and answers for its progress.

    Attributes:
        slot, kv: None until the producer's first tokens are scheduled.
        logits: those after the last token, for prompts that end at the boundary; None until the checkpoint is ready,
            and for the end of an answer.
        leases: requests whose next piece reads the states.
        packed: ``token_ids`` as bytes, where they are looked up by prefix.
        pins: callers who want it kept whatever happens.
        worth, last_used: order of eviction, kept by the index.
        queued: version of its entry in the order of eviction.
        scope, content: see :class:`~ckpt_hf.keys.KeyScope`; None and empty where the request did not say.
    """

    key: bytes
    token_ids: tuple[int, ...]
    producer: int
    retention: Retention = Retention.DECLARED
    scope: KeyScope | None = None
    content: bytes = b""
    status: CheckpointStatus = CheckpointStatus.UNREADY
    slot: int | None = None
    kv: KVSegment | None = None
    logits: Any = None
    leases: int = 0
    pins: int = 0
    packed: bytes = b""
    worth: float = 0.0
    last_used: int = 0
    queued: int = 0

    def move(self, status: CheckpointStatus) -> None:
        """Change the status.

        Raises:
            CheckpointRuntimeError: the transition is not in ``CHECKPOINT_TRANSITIONS``.
        """
        if status not in CHECKPOINT_TRANSITIONS[self.status]:
            raise CheckpointRuntimeError(
                f"checkpoint {self.key.hex()[:12]} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status


@dataclass(slots=True)
class CheckpointLimits:
    """What may stay when nobody needs it: number of checkpoints and bytes, and how many bytes each part takes."""

    slots: int | None
    bytes: int | None
    bytes_per_slot: int
    bytes_per_token: int
    bytes_of_logits: Callable[[Any], int]

"""What one packed forward computes: the frozen result of scheduling, read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

from .index import Checkpoint
from .kv import KVSegment
from .requests import Request


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive tokens of one request that run as one packed sequence.

    Attributes:
        request: whose tokens these are.
        start, stop: token positions; ``start == stop`` only copies the start state into ``destination``.
        parent: index of the piece in the same plan that ends where this one starts, or -1.
        source: slot of the start state when there is no parent, or -1 to start from zero.
        destination: slot of the final state.
        kv: segment that receives the piece's keys and values.
        kv_before: tokens that ``kv`` held before this piece.
        depth: number of ancestors in the plan; pieces of one depth run in the same phase.
        publishes: checkpoint that is complete once this piece has run.
    """

    request: Request
    start: int
    stop: int
    parent: int
    source: int
    destination: int
    kv: KVSegment
    kv_before: int
    depth: int
    publishes: Checkpoint | None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LogitsWanted:
    """Whose next token can be chosen after this step, and from where.

    Exactly one of ``piece`` (logits after that piece's last token) and ``checkpoint`` (logits kept with it) is set.
    """

    request: Request
    piece: int | None = None
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed forward: pieces sorted by depth, those without a prefix first, those with one prefix side by side.

    Attributes:
        pieces: consecutive tokens of requests, one packed sequence each.
        logits: what the pieces are asked for. The logits of all ``decodes`` are wanted besides.
        decodes: requests that get one more token in this step, after the pieces in the packed row. Until the commit
            their token is ``token_ids[position]``, their state is in ``slot``, both read and written, and the token's
            key/value row is the last one of ``kv``.
        step: number of the step.
    """

    pieces: tuple[Piece, ...]
    logits: tuple[LogitsWanted, ...]
    decodes: tuple[Request, ...] = ()
    step: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return sum(piece.length for piece in self.pieces) + len(self.decodes)

    @property
    def logits_pieces(self) -> tuple[int, ...]:
        """Pieces after whose last token logits are needed: to choose a token, or to keep with a checkpoint, from which
        a prompt that ends there will choose."""
        wanted = {w.piece for w in self.logits if w.piece is not None}
        return tuple(sorted(wanted | {i for i, piece in enumerate(self.pieces) if piece.publishes is not None}))

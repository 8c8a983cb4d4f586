"""One plan through the model: from tokens and slots to logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .batch import decode_pieces
from .decode_graphs import forward
from .memory import StepMemory
from .plan import Piece, StepPlan
from .requests import Request


def requests_of(plan: StepPlan) -> list[Request]:
    """Everybody whom the step serves, each once."""
    pieces = [piece.request for piece in plan.pieces] + [wanted.request for wanted in plan.logits]
    return list(dict.fromkeys((*pieces, *plan.decodes)))


def is_alive(plan: StepPlan) -> bool:
    """Whether the step still serves anybody: requests may end between its planning and its running."""
    return any(request.in_step == plan.step for request in requests_of(plan))


def run_plan(model: Any, memory: StepMemory, plan: StepPlan) -> dict[Request, Tensor]:
    """Compute ``plan`` and keep the logits of the checkpoints that it completes; to be committed afterwards.

    Returns:
        Logits ``[V]`` after the newest token of each request that can choose its next one.
    """
    memory.reserve()
    decodes = decode_pieces(plan)
    rows: dict[int, Tensor] = {}
    results: dict[Request, Tensor] = {}
    if decodes or any(piece.length for piece in plan.pieces):
        logits = _logits(model, memory, plan, decodes)
        prompts = len(logits) - len(decodes)
        rows = dict(zip(plan.logits_pieces, logits[:prompts], strict=True))
        results = dict(zip((piece.request for piece in decodes), logits[prompts:], strict=True))
    else:
        memory.states.copy([p.source for p in plan.pieces], [p.destination for p in plan.pieces])
    for i, piece in enumerate(plan.pieces):
        if piece.publishes is not None:
            piece.publishes.logits = rows[i].clone()
    for wanted in plan.logits:
        if wanted.request.in_step == plan.step:
            source = wanted.checkpoint
            results[wanted.request] = rows[wanted.piece] if source is None else source.logits  # type: ignore[index]
    return results


def _logits(model: Any, memory: StepMemory, plan: StepPlan, decodes: Sequence[Piece]) -> Tensor:
    """Logits ``[L, V]`` of the pieces that want them and then of the decode tokens."""
    if memory.graphs is not None and not plan.pieces:
        logits = memory.graphs.run(decodes)
        if logits is not None:
            return logits
    batch = memory.builder.build(plan, memory.states.num_slots)
    return forward(model, batch, memory.states, memory.kv)

"""One plan through the model: from tokens and slots to logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .batch import decode_pieces
from .decode_graphs import forward
from .memory import StepMemory
from .plan import StepPlan
from .requests import Request


def requests_of(plan: StepPlan) -> list[Request]:
    """Everybody whom the step serves, each once."""
    pieces = [piece.request for piece in plan.pieces] + [wanted.request for wanted in plan.logits]
    return list(dict.fromkeys((*pieces, *plan.decodes)))


def run_plan(model: Any, memory: StepMemory, plan: StepPlan) -> dict[Request, Tensor]:
    """Compute ``plan`` and keep the logits of the checkpoints that it completes; to be committed afterwards.

    Returns:
        Logits ``[V]`` after the newest token of each request that can choose its next one.
    """
    memory.reserve()
    rows: dict[int, Tensor] = {}
    results: dict[Request, Tensor] = {}
    if plan.num_tokens:
        logits = _logits(model, memory, plan)
        prompts = len(logits) - len(plan.decodes)
        rows = dict(zip(plan.logits_pieces, logits[:prompts], strict=True))
        results = dict(zip((p.request for p in decode_pieces(plan)), logits[prompts:], strict=True))
    else:
        memory.states.copy([p.source for p in plan.pieces], [p.destination for p in plan.pieces])
    for i, piece in enumerate(plan.pieces):
        if piece.publishes is not None:
            piece.publishes.logits = rows[i].clone()
    for wanted in plan.logits:
        checkpoint = wanted.checkpoint
        results[wanted.request] = rows[wanted.piece] if checkpoint is None else checkpoint.logits  # type: ignore[index]
    return results


def _logits(model: Any, memory: StepMemory, plan: StepPlan) -> Tensor:
    """Logits ``[L, V]`` of the pieces that want them and then of the decode tokens."""
    if memory.graphs is not None and not plan.pieces:
        logits = memory.graphs.run(decode_pieces(plan))
        if logits is not None:
            return logits
    batch = memory.builder.build(plan, memory.states.num_slots)
    return forward(model, batch, memory.states, memory.kv)

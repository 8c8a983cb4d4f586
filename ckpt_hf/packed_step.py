"""One plan through the model: from tokens and slots to logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .batch import decode_pieces
from .layers import PackedCache
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
        batch = memory.builder.build(plan, memory.states.num_slots)
        output = model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask={"full_attention": None, "linear_attention": None},
            cache=PackedCache(batch, memory.states, memory.kv),
            use_cache=True,
            logits_to_keep=batch.logits_columns,
            return_dict=True,
        )
        logits = output.logits[0]
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

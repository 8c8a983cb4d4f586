"""Single ops and shapes of forests, each beside a yardstick: ``python -m benchmarks.report --parts``.

Every piece is checked against fp64 before it is timed. Lengths are divided by 16 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

import ckpt_ops
from benchmarks.arms import TwoPhase
from benchmarks.floors import bytes_moved, copy_of
from benchmarks.loads import Load, Shape
from benchmarks.measure import Run, Timer, Timing
from benchmarks.parts import DeltaRule, Tokens
from benchmarks.tables import Row, make_rows
from benchmarks.workload import START_SLOT, Workload
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.reference import causal_conv1d_prefill_reference, gdn_decode_reference
from ckpt_ops.testing import conv_budget, delta_rule_budget, make_delta_rule_inputs, make_pool, relative_error

OURS = "ours"
TITLES = {
    OURS: "ckpt_ops",
    "copy": "a copy of as many bytes",
    "path": "its longest path alone",
    "plain": "one plain packed call",
    "in_full": "every prompt in full, one packed call",
}
DECODE_BATCHES = (1, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Piece:
    """Something of ours to time, beside other things.

    Attributes:
        check: the relative error against fp64; raises RuntimeError when it is over its budget.
        yardsticks: what stands beside it, by a name of :data:`TITLES`.
    """

    name: str
    run: Run
    check: Callable[[], float]
    yardsticks: dict[str, Run]


Builder = Callable[[Shape, torch.device, int], Piece]


def layer_front(shape: Shape, device: torch.device, seed: int) -> Piece:
    """All between a layer's projections: q, k, v, a and b in, o out, two-phase."""
    layer = Shape(shape.heads_k, shape.heads_v, shape.dim, shape.dtype, conv_width=4)
    load = Load.of(1, _scaled(512, device), 16, max(1, _scaled(64, device)))
    arm = TwoPhase(Workload(layer, load, device, seed))
    return Piece("layer's front", arm.run, arm.check, {"copy": copy_of(bytes_moved(layer, load), device)})


def convolution(shape: Shape, device: torch.device, seed: int) -> Piece:
    """The convolution with SiLU over one sequence of 16384 tokens."""
    tokens, channels, width = _scaled(16384, device), (2 * shape.heads_k + shape.heads_v) * shape.dim, 4
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=generator).to(device, shape.dtype)
    weight = torch.randn(channels, width, generator=generator).to(device, shape.dtype) * 0.5
    states = make_pool(2, channels, width - 1, dtype=shape.dtype, seed=seed).to(device)
    table = SegmentTable.build([Segment(tokens, source=0, destination=1)], 2, device)

    def run() -> Tensor:
        return ckpt_ops.causal_conv1d_prefill(x, weight, None, states, table, activation="silu")

    def check() -> float:
        expected, pool = causal_conv1d_prefill_reference(x, weight, None, states, table, activation="silu")
        error = _within(relative_error(run(), expected), conv_budget(shape.dtype, shape.dtype))
        if not torch.equal(states.double(), pool):
            raise RuntimeError("the convolution's states are not the last tokens")
        return error

    return Piece(f"convolution, {tokens}", run, check, {"copy": copy_of(2 * x.nbytes, device)})


def decode(batch: int) -> Builder:
    """One token for each of ``batch`` requests, against reading and writing their states."""

    def build(shape: Shape, device: torch.device, seed: int) -> Piece:
        inputs = make_delta_rule_inputs(
            batch, shape.heads_k, shape.heads_v, shape.dim, shape.dim, dtype=shape.dtype, seed=seed
        )
        tokens = inputs.to(device).tensors()
        states = make_pool(batch, shape.heads_v, shape.dim, shape.dim, seed=seed + 1).to(device)
        slots = torch.arange(batch, dtype=torch.int32, device=device)

        def run() -> Tensor:
            return ckpt_ops.gdn_decode(*tokens, states, slots)

        def check() -> float:
            expected, pool = gdn_decode_reference(*tokens, states, slots)
            error = max(relative_error(run(), expected), relative_error(states, pool))
            return _within(error, delta_rule_budget(shape.dtype, rounds_operands=device.type == "cuda"))

        return Piece(f"decode, batch {batch}", run, check, {"copy": copy_of(2 * states.nbytes, device)})

    return build


def forest(shape: Shape, device: torch.device, seed: int) -> Piece:
    """Depth 3: a prefix of 2048, 4 documents of 512 behind it, 8 questions of 64 behind each."""
    prefix, document, question = (max(1, _scaled(n, device)) for n in (2048, 512, 64))
    segments = [Segment(prefix, source=START_SLOT, destination=1)]
    segments += [Segment(document, parent=0, destination=2 + i) for i in range(4)]
    segments += [Segment(question, parent=1 + i % 4, destination=6 + i) for i in range(32)]
    part, table = _delta_rule(shape, segments, device, seed)
    slots = table.num_slots
    bounds = list(accumulate((segment.length for segment in segments), initial=0))
    lineages = [(0, 1 + i % 4, 5 + i) for i in range(32)]
    rows = [torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in lineage]).to(device) for lineage in lineages]
    alone = tuple(x[rows[0]] for x in part.tokens)
    path = SegmentTable.build(_chain((prefix, document, question)), slots, device)
    together = tuple(x[torch.cat(rows)] for x in part.tokens)
    prompts = [Segment(len(row), source=START_SLOT, destination=1 + i) for i, row in enumerate(rows)]
    full = SegmentTable.build(prompts, slots, device)
    return Piece(
        "forest of depth 3",
        lambda: part.chunked(part.tokens, table),
        lambda: _check(part, table, part.chunked),
        {"path": lambda: part.chunked(alone, path), "in_full": lambda: part.chunked(together, full)},
    )


def independent(shape: Shape, device: torch.device, seed: int) -> Piece:
    """16 prompts of 576 that share nothing, through the two-phase op."""
    length = _scaled(576, device)
    part, table = _delta_rule(
        shape, [Segment(length, source=START_SLOT, destination=1 + i) for i in range(16)], device, seed
    )
    states = part.pools[0]

    def run(tokens: Tokens, table: SegmentTable) -> Tensor:
        q, k, v, g, beta = tokens
        return ckpt_ops.two_phase_gdn_prefill(q, k, v, g, beta, states, table)

    return Piece(
        f"16 x {length}, apart",
        lambda: run(part.tokens, table),
        lambda: _check(part, table, run),
        {"plain": lambda: part.chunked(part.tokens, table)},
    )


BUILDERS: dict[str, Builder] = {
    "layer": layer_front,
    "convolution": convolution,
    **{f"decode_{batch}": decode(batch) for batch in DECODE_BATCHES},
    "forest": forest,
    "independent": independent,
}

YARDSTICKS = dict.fromkeys(BUILDERS, ("copy",)) | {"forest": ("path", "in_full"), "independent": ("plain",)}
"""Names of what stands beside each piece, known before it is built."""


def measure_pieces(shape: Shape, timer: Timer, seed: int, failures: list[str]) -> Iterator[list[Row]]:
    """Check, then time, each piece and its yardsticks; ratios are against ours."""
    for name, build in BUILDERS.items():
        timings: dict[tuple[str, str], tuple[Timing, float | None]] = {}
        try:
            piece = build(shape, timer.device, seed)
            name = piece.name
            error = piece.check()
            for arm, run in {OURS: piece.run, **piece.yardsticks}.items():
                for mode, time_it in timer.modes().items():
                    timings[arm, mode] = time_it(run), error if arm == OURS else None
        except Exception as failure:  # a wrong result, no memory, or a kernel that does not compile
            failures.append(f"{name}: {type(failure).__name__}: {failure}")
        yield make_rows(name, timings, OURS)


def _scaled(length: int, device: torch.device) -> int:
    return length if device.type == "cuda" else length // 16


def _chain(lengths: tuple[int, ...]) -> list[Segment]:
    """Segments that continue each other, from the start slot."""
    first = Segment(lengths[0], source=START_SLOT, destination=1)
    return [first, *(Segment(n, parent=i, destination=2 + i) for i, n in enumerate(lengths[1:]))]


def _delta_rule(
    shape: Shape, segments: list[Segment], device: torch.device, seed: int
) -> tuple[DeltaRule, SegmentTable]:
    slots = 1 + len(segments)
    part = DeltaRule(shape, sum(segment.length for segment in segments), slots, device, seed)
    return part, SegmentTable.build(segments, slots, device)


def _check(part: DeltaRule, table: SegmentTable, run: Callable[[Tokens, SegmentTable], Tensor]) -> float:
    expected, (pool,) = part.reference(table)
    part.pools[0][START_SLOT + 1 :] = torch.nan
    error = relative_error(run(part.tokens, table), expected)
    return _within(max(error, relative_error(part.pools[0], pool)), part.budget)


def _within(error: float, budget: float) -> float:
    if not error <= budget:
        raise RuntimeError(f"relative error {error:.2e} against fp64; at most {budget:.2e} is right")
    return error

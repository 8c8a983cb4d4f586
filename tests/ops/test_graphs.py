"""Steps captured in a CUDA graph and replayed with other slots, lengths and tokens: equal, to the bit, to eager calls.

A graph fixes what the host decides: numbers of tokens, of segments in each phase, and addresses. The CPU runs the same
steps without a graph, so that the bookkeeping here is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ckpt_ops
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.testing import make_pool

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
LINKS = ("cu_seqlens", "parents", "sources", "destinations")
SLOTS, TOKENS = 8, 300


def bucket(producers: tuple[int, int], consumers: tuple[int, int, int], slots: list[int]) -> list[Segment]:
    """Two Producers, of which the second starts from ``slots[2]``, and three Consumers, together of TOKENS tokens."""
    first, second, start, kept = slots
    segments = [Segment(producers[0], destination=first), Segment(producers[1], source=start, destination=second)]
    segments += [Segment(consumers[0], parent=0, destination=kept), Segment(consumers[1], parent=1)]
    segments.append(Segment(consumers[2], parent=0))
    assert sum(segment.length for segment in segments) == TOKENS
    return segments


STEPS = [
    bucket((130, 64), (33, 64, 9), [0, 1, 2, 3]),
    bucket((1, 2), (1, 295, 1), [5, 6, 7, 0]),
    bucket((64, 65), (0, 107, 64), [3, 2, 1, 7]),
    bucket((0, 0), (150, 150, 0), [4, 3, 0, 1]),
    bucket((130, 64), (33, 64, 9), [0, 1, 2, 3]),
]


@dataclass(frozen=True)
class Shape:
    heads_k: int
    heads_v: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        return 2 * self.heads_k * self.dim_k + self.heads_v * self.dim_v


# On sm_90 the first has kernels of its own; the others run the plain ones.
SHAPES = [
    Shape(4, 8, 128, 128, torch.bfloat16),
    Shape(1, 2, 256, 64, torch.float16),
    Shape(2, 2, 64, 64, torch.float32),
]


class Layer:
    """Convolution, gates and delta rule of one layer, on tensors whose addresses stay."""

    def __init__(self, shape: Shape, rows: int, device: str) -> None:
        self.shape, heads = shape, shape.heads_v
        self.x, self.a, self.b = (
            torch.zeros(rows, width, dtype=shape.dtype, device=device) for width in (shape.channels, heads, heads)
        )
        self.weight = make_pool(shape.channels, 4, dtype=shape.dtype, seed=2).to(device)
        self.rates = make_pool(heads, seed=3).to(device), make_pool(heads, seed=4).to(device)
        self.histories = torch.zeros(SLOTS, shape.channels, 3, dtype=shape.dtype, device=device)
        self.recurrent = torch.zeros(SLOTS, heads, shape.dim_k, shape.dim_v, device=device)
        self.results: tuple[Tensor, ...] = ()

    def fill(self, seed: int) -> None:
        """Other tokens, and pools as before the step."""
        for offset, tensor in enumerate((self.x, self.a, self.b, self.histories, self.recurrent)):
            tensor.copy_(make_pool(*tensor.shape, dtype=tensor.dtype, seed=10 * seed + offset))

    def run(self, links: SegmentTable | Tensor) -> None:
        """A prefill of a table, or a decode step of slots."""
        conv = (self.x, self.weight, None, self.a, self.b, *self.rates, self.histories)
        shape = self.shape
        if isinstance(links, SegmentTable):
            mixed, g, beta = ckpt_ops.conv_gates_prefill(*conv, links, activation="silu")
        else:
            mixed, g, beta = ckpt_ops.conv_gates_decode(*conv, links, activation="silu")
        key_size = shape.heads_k * shape.dim_k
        q, k, v = mixed.split([key_size, key_size, shape.heads_v * shape.dim_v], 1)
        q, k = (part.unflatten(1, (shape.heads_k, shape.dim_k)) for part in (q, k))
        tokens = (q, k, v.unflatten(1, (shape.heads_v, shape.dim_v)), g, beta)
        if isinstance(links, SegmentTable):
            out = ckpt_ops.two_phase_gdn_prefill(*tokens, self.recurrent, links)
        else:
            out = ckpt_ops.gdn_decode(*tokens, self.recurrent, links)
        self.results = (mixed, g, beta, out)

    def everything(self) -> tuple[Tensor, ...]:
        return (*self.results, self.histories, self.recurrent)


def capture(run: Callable[[], None], shape: Shape, device: str, warm: str) -> Callable[[], None]:
    """A function that replays ``run``. ``warm``: what has compiled the kernels, the step itself or ``warmup``."""
    if device == "cpu":
        return run
    if warm == "step":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
    else:
        ckpt_ops.warmup(shape.heads_k, shape.heads_v, shape.dim_k, shape.dim_v, shape.dtype, device=device)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for name, result, other in zip(("mixed", "g", "beta", "out", "histories", "recurrent"), left, right, strict=True):
        assert result.isfinite().all(), name
        assert torch.equal(result, other), f"{name} differs from eager"


@DEVICES
@pytest.mark.parametrize("warm", ["step", "warmup"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill(shape: Shape, warm: str, device: str) -> None:
    captured, eager = Layer(shape, TOKENS, device), Layer(shape, TOKENS, device)
    fixed = SegmentTable.build(STEPS[0], SLOTS, device)
    replay = capture(lambda: captured.run(fixed), shape, device, warm)
    for seed, step in enumerate(STEPS):
        table = SegmentTable.build(step, SLOTS, device)
        assert table.phase_offsets == fixed.phase_offsets
        for name in LINKS:
            getattr(fixed, name).copy_(getattr(table, name))
        captured.fill(seed)
        eager.fill(seed)
        replay()
        eager.run(table)
        equal(captured.everything(), eager.everything())


@DEVICES
@pytest.mark.parametrize("warm", ["step", "warmup"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(shape: Shape, warm: str, device: str) -> None:
    """Rows that end keep their place and get slot -1."""
    captured, eager = Layer(shape, 5, device), Layer(shape, 5, device)
    fixed = torch.arange(5, dtype=torch.int32, device=device)
    replay = capture(lambda: captured.run(fixed), shape, device, warm)
    for seed, row in enumerate(([0, 1, 2, 3, 4], [7, -1, 3, 0, -1], [-1, -1, -1, -1, -1], [6, 5, 2, 1, 0])):
        slots = torch.tensor(row, dtype=torch.int32, device=device)
        fixed.copy_(slots)
        captured.fill(seed)
        eager.fill(seed)
        replay()
        eager.run(slots)
        equal(captured.everything(), eager.everything())

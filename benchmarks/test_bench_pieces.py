"""pytest-benchmark over single ops and their yardsticks; ours is checked against fp64 before it is timed."""

from __future__ import annotations

import gc
from functools import lru_cache

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.conftest import time_with
from benchmarks.loads import QUARTER, WHOLE_LAYER, Shape, on_cpu
from benchmarks.measure import EAGER, MODES, Timer
from benchmarks.pieces import BUILDERS, OURS, YARDSTICKS, Piece

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [shape if DEVICE.type == "cuda" else on_cpu(shape) for shape in (WHOLE_LAYER, QUARTER)]
CASES = [
    pytest.param(shape, name, arm, id=f"{shape.heads_k}-{shape.heads_v}-{name}-{arm}")
    for shape in SHAPES
    for name in BUILDERS
    for arm in (OURS, *YARDSTICKS[name])
]


@lru_cache(maxsize=1)
def piece(shape: Shape, name: str) -> Piece:
    """Shared by ours and its yardsticks, which run one after the other."""
    gc.collect()
    return BUILDERS[name](shape, DEVICE, 1)


@pytest.mark.parametrize("mode", MODES if DEVICE.type == "cuda" else [EAGER])
@pytest.mark.parametrize(("shape", "name", "arm"), CASES)
def test_piece(benchmark: BenchmarkFixture, timer: Timer, shape: Shape, name: str, arm: str, mode: str) -> None:
    built = piece(shape, name)
    benchmark.group = f"H_k {shape.heads_k}, H_v {shape.heads_v} | {built.name} | {mode}"
    if arm == OURS:
        benchmark.extra_info["error"] = built.check()
    time_with(benchmark, timer, built.run if arm == OURS else built.yardsticks[arm], mode)

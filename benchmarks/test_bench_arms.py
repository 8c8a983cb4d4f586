"""pytest-benchmark over loads, arms and modes; each arm is checked against fp64 before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.arms import ARMS, Arm
from benchmarks.loads import Load, Shape
from benchmarks.measure import Timer, capture
from benchmarks.peers import peer_arms
from benchmarks.report import plan
from benchmarks.workload import Workload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = [
    pytest.param(shape, load, arm, id=f"{shape.heads_k}-{shape.heads_v}-{load.name.replace(' ', '')}-{arm.name}")
    for shape, loads in plan(DEVICE, long=False)
    for load in loads
    for arm in (*ARMS, *peer_arms(shape, DEVICE))
]


@lru_cache(maxsize=1)
def workload(shape: Shape, load: Load) -> Workload:
    """Shared by the arms of one load, which run one after the other."""
    return Workload(shape, load, DEVICE)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(("shape", "load", "kind"), CASES)
def test_arm(benchmark: BenchmarkFixture, timer: Timer, shape: Shape, load: Load, kind: type[Arm], mode: str) -> None:
    if mode == "graph" and DEVICE.type != "cuda":
        pytest.skip("CUDA graphs need a CUDA device")
    arm = kind(workload(shape, load))
    benchmark.group = f"{shape.title} | {load.name} | {mode}"
    benchmark.extra_info["error"] = arm.check()
    run: Callable[[], object] = arm.run if mode == "eager" else capture(arm.run)

    def call() -> None:
        run()
        timer.synchronize()

    benchmark.pedantic(call, rounds=timer.repetitions, warmup_rounds=timer.warmups)

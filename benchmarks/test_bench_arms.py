"""pytest-benchmark over loads, arms and modes; each arm is checked against fp64 before it is timed."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.arms import ARMS, Arm
from benchmarks.conftest import time_with
from benchmarks.loads import Load, Shape
from benchmarks.measure import EAGER, MODES, Timer
from benchmarks.peers import peer_arms
from benchmarks.report import plan
from benchmarks.workload import Workload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = [
    pytest.param(
        shape,
        load,
        arm,
        id=f"{shape.heads_k}-{shape.heads_v}{'-conv' * bool(shape.conv_width)}-{load.name.replace(' ', '')}-{arm.name}",
    )
    for shape, loads in plan(DEVICE, long=False)
    for load in loads
    for arm in (*ARMS, *peer_arms(shape, DEVICE))
]


@lru_cache(maxsize=1)
def workload(shape: Shape, load: Load) -> Workload:
    """Shared by the arms of one load, which run one after the other."""
    return Workload(shape, load, DEVICE)


@pytest.mark.parametrize("mode", MODES if DEVICE.type == "cuda" else [EAGER])
@pytest.mark.parametrize(("shape", "load", "kind"), CASES)
def test_arm(benchmark: BenchmarkFixture, timer: Timer, shape: Shape, load: Load, kind: type[Arm], mode: str) -> None:
    arm = kind(workload(shape, load))
    benchmark.group = f"{shape.title} | {load.name} | {mode}"
    benchmark.extra_info["error"] = arm.check()
    time_with(benchmark, timer, arm.run, mode)

"""``python -m pytest benchmarks`` times on the GPU where there is one, else on the CPU with smaller loads.

Its times are the host's, from the call to the end of the device's work, of one round: ``extra_info["calls"]`` says how
many calls that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.measure import EAGER, GRAPH_CALLS, GRAPH_OF_MANY, Run, Timer, capture, environment

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


@pytest.fixture(scope="session")
def timer() -> Timer:
    """The device, with its clocks up."""
    timer = Timer(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    timer.settle()
    return timer


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def time_with(benchmark: BenchmarkFixture, timer: Timer, run: Run, mode: str) -> None:
    """Time ``run`` in one of the report's modes."""
    calls = GRAPH_CALLS if mode == GRAPH_OF_MANY else 1
    benchmark.extra_info["calls"] = calls
    once: Run = run if mode == EAGER else capture(run, timer.warmups, calls)

    def call() -> None:
        once()
        timer.synchronize()

    benchmark.pedantic(call, rounds=timer.repetitions, warmup_rounds=timer.warmups)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    """Store GPU, clocks, versions and commit with the figures."""
    machine_info.update(environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")))

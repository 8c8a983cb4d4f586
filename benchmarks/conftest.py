"""``python -m pytest benchmarks`` times on the GPU where there is one, else on the CPU with smaller loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.measure import Timer, environment


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


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, object]) -> None:
    """Store GPU, clocks, versions and commit with the figures."""
    machine_info.update(environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")))

"""pytest-benchmark of the embedded model: unpatched, with checkpoints on pages not seen before, and on cached pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("pytest_benchmark")

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.embedded import TITLES, embedded_arms, load_catalog
from benchmarks.measure import Timer

Arms = dict[str, Callable[[], list[Tensor]]]


@pytest.fixture(scope="module")
def arms(timer: Timer) -> Arms:
    return embedded_arms(load_catalog(timer.device, pages=4, offers=16, seed=1))


@pytest.mark.parametrize("name", TITLES)
def test_embedded(benchmark: BenchmarkFixture, timer: Timer, arms: Arms, name: str) -> None:
    expected = torch.cat(arms["unpatched"]())
    assert torch.equal(torch.cat(arms[name]()), expected), "answers differ from the unpatched model's"

    def call() -> None:
        arms[name]()
        timer.synchronize()

    benchmark.pedantic(call, rounds=5, warmup_rounds=1)

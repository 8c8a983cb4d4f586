"""pytest-benchmark over the kind of traffic and the number of requests that wait; one round is one step."""

from __future__ import annotations

import pytest

pytest.importorskip("pytest_benchmark")

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.scheduler_overhead import TRAFFIC, WAITING, Server, Traffic


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("traffic", TRAFFIC, ids=lambda traffic: traffic.name)
def test_step(benchmark: BenchmarkFixture, traffic: Traffic, waiting: int) -> None:
    server = Server(traffic, waiting)
    for _ in range(64):
        server.prepare()
        server.step()
    benchmark.pedantic(server.step, setup=server.prepare, rounds=200)
    assert len(server.scheduler.requests) == waiting + 64, "the load was not constant"

"""Counters, gauges and histograms against sequences of events whose sums are known."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_hf.errors import CheckpointRuntimeError, CheckpointValueError
from ckpt_hf.events import Event
from ckpt_hf.histogram import Histogram
from ckpt_hf.metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELLED, Metrics
from ckpt_hf.prometheus import export_prometheus

from .event_script import Script, producer_and_consumer


class Run:
    """A script whose events go to metrics, on the script's clock."""

    def __init__(self) -> None:
        self.script = Script(lambda event: self.metrics(event))
        self.metrics = Metrics(self.script.clock)

    @property
    def values(self) -> dict[str, Any]:
        return self.metrics.as_dict()


def test_all_values_are_there_before_the_first_event() -> None:
    values = Metrics().as_dict()
    assert set(values) == {*COUNTERS, *GAUGES, *HISTOGRAMS, *LABELLED}
    assert all(values[name] == 0 for name in (*COUNTERS, *GAUGES))


def test_a_producer_and_its_consumer() -> None:
    run = Run()
    producer_and_consumer(run.script)
    values = run.values
    expected = {
        "requests_submitted": 2,
        "hits": 1,
        "misses": 1,
        "deferred": 1,
        "tokens_computed": 512 + 32 + 64,
        "tokens_saved": 512,
        "tokens_decoded": 4,
        "steps": 5,
        "checkpoints_published": 1,
        "checkpoints": 1,
        "slots_used": 1,
        "bytes_used": 1000,
        "requests_finished": {"length": 1, "eos": 1},
        "boundaries_missed": {"never seen": 1},
        "requests_running": 0,
        "requests_deferred": 0,
        "requests_waiting": 0,
    }
    assert {name: values[name] for name in expected} == expected
    assert (values["queue_seconds"]["count"], values["queue_seconds"]["sum"]) == (2, 2.0)
    assert (values["deferred_seconds"]["count"], values["deferred_seconds"]["sum"]) == (1, 2.0)
    assert (values["first_token_seconds"]["count"], values["first_token_seconds"]["sum"]) == (2, 6.0)
    assert (values["request_seconds"]["count"], values["request_seconds"]["sum"]) == (2, 10.0)
    assert (values["step_tokens"]["count"], values["step_tokens"]["sum"]) == (5, 612)


def test_gauges_follow_a_request() -> None:
    run = Run()
    script = run.script

    def states() -> tuple[int, ...]:
        return tuple(run.values[f"requests_{state}"] for state in ("waiting", "deferred", "running"))

    script.submit(7, 10, 5)
    assert states() == (1, 0, 0)
    script.emit("deferred", 7, key="k", producer=3)
    assert states() == (0, 1, 0)
    script.emit("deferred", 7, key="k", producer=4)
    assert states() == (0, 1, 0)
    script.emit("started", 7, position=5, cached=5)
    assert states() == (0, 0, 1)
    script.emit("preempted", 7, position=12)
    assert states() == (1, 0, 0)
    script.emit("finished", 7, reason="cancelled")
    assert states() == (0, 0, 0)


def test_a_failed_step_counts_nothing_and_its_lost_checkpoint_saves_nothing() -> None:
    run = Run()
    script = run.script
    script.submit(0, 100, 60)
    script.emit("started", 0, position=60, cached=60)
    script.run(1.0, (0, 60, 100), fails=True)
    assert (run.values["tokens_computed"], run.values["steps"], run.values["steps_failed"]) == (0, 0, 1)
    assert run.values["tokens_saved"] == 0
    script.emit("started", 0, position=0, cached=0)
    script.run(1.0, (0, 0, 60), (0, 60, 100))
    assert (run.values["tokens_computed"], run.values["tokens_saved"], run.values["hits"]) == (100, 0, 0)
    assert run.values["misses"] == 1


def test_a_step_that_is_said_to_have_failed_is_counted_once() -> None:
    run = Run()
    script = run.script
    script.emit("step", phase="begin", tokens=8)
    script.emit("piece", 0, start=0, stop=8, slot=0)
    script.emit("failed", error="out of memory")
    script.emit("step", phase="end", tokens=0)
    script.emit("step", phase="end", tokens=0)
    assert (run.values["steps"], run.values["steps_failed"], run.values["tokens_computed"]) == (0, 1, 0)


def test_a_preempted_request_saves_no_more_than_at_first() -> None:
    run = Run()
    script = run.script
    script.submit(0, 100, 40, 80)
    script.emit("started", 0, position=40, cached=40)
    script.run(1.0, (0, 40, 80))
    script.emit("preempted", 0, position=80)
    script.emit("started", 0, position=80, cached=80)
    script.run(1.0, (0, 80, 100))
    assert (run.values["tokens_saved"], run.values["tokens_computed"], run.values["preempted"]) == (40, 60, 1)


def test_events_of_unknown_requests_and_kinds_break_nothing() -> None:
    run = Run()
    run.script.emit("started", 99, position=0, cached=0)
    run.script.emit("deferred", 99, key="k", producer=1)
    run.script.emit("finished", 99, reason="eos")
    run.metrics(Event("something new", 0))  # type: ignore[arg-type]
    assert run.values["requests_running"] == run.values["requests_deferred"] == 0


def test_nothing_is_kept_of_requests_that_ended() -> None:
    run = Run()
    for request in range(1000):
        run.script.submit(request, 4)
        run.script.emit("started", request, position=0, cached=0)
        run.script.run(0.1, (request, 0, 4))
        run.script.emit("finished", request, reason="eos")
    assert not run.metrics._live and not run.metrics._steps


def test_threads_count_every_event() -> None:
    metrics = Metrics()

    def submit(first: int) -> None:
        for request in range(first, first + 500):
            metrics(Event("submitted", 0, request, {"prompt_tokens": 1, "boundaries": [], "priority": 0}))

    threads = [threading.Thread(target=submit, args=(500 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.as_dict()["requests_submitted"] == metrics.as_dict()["requests_waiting"] == 4000


@given(st.lists(st.floats(0, 2000), max_size=50), st.floats(0.01, 1))
def test_a_histogram_counts_each_value_once_and_brackets_the_quantile(values: list[float], share: float) -> None:
    histogram = Histogram((1.0, 10.0, 100.0, 1000.0))
    for value in values:
        histogram.add(value)
    told: Any = histogram.as_dict()
    assert told["count"] == len(values)
    assert told["buckets"] == {
        **{str(bound): sum(value <= bound for value in values) for bound in histogram.bounds},
        "+Inf": len(values),
    }
    quantile = histogram.quantile(share)
    if not values:
        assert quantile is None
        return
    assert quantile is not None
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    edges = [0.0, *histogram.bounds]
    bucket = next((i for i, bound in enumerate(histogram.bounds) if exact <= bound), None)
    if bucket is None:
        assert quantile == histogram.bounds[-1]
    else:
        assert edges[bucket] <= quantile <= edges[bucket + 1]


def test_prometheus_reads_the_same_numbers() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    run = Run()
    producer_and_consumer(run.script)
    registry = prometheus_client.CollectorRegistry()
    collector = export_prometheus(run.metrics, registry)
    read = registry.get_sample_value
    assert read("ckpt_hf_tokens_saved_total") == 512
    assert read("ckpt_hf_slots_used") == 1
    assert read("ckpt_hf_requests_finished_total", {"reason": "eos"}) == 1
    assert read("ckpt_hf_request_seconds_count") == 2
    assert read("ckpt_hf_request_seconds_sum") == 10.0
    assert read("ckpt_hf_request_seconds_bucket", {"le": "5.0"}) == 2
    run.script.emit("evicted", key="k", tokens=512)
    assert read("ckpt_hf_evictions_total") == 1
    assert b"# HELP ckpt_hf_hits_total" in prometheus_client.generate_latest(registry)
    registry.unregister(collector)
    assert read("ckpt_hf_hits_total") is None


def test_prometheus_takes_a_namespace_once() -> None:
    registry = pytest.importorskip("prometheus_client").CollectorRegistry(auto_describe=True)
    collector = export_prometheus(Metrics(), registry)
    with pytest.raises(CheckpointValueError, match="namespace 'ckpt_hf' is taken"):
        export_prometheus(Metrics(), registry)
    export_prometheus(Metrics(), registry, namespace="second")
    registry.unregister(collector)
    export_prometheus(Metrics(), registry)


def test_without_prometheus_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(CheckpointRuntimeError, match=r"gdn-checkpoint\[metrics\]"):
        export_prometheus(Metrics())

"""The metrics of an engine for Prometheus, through ``prometheus_client`` where that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import CheckpointRuntimeError, CheckpointValueError
from .metrics import COUNTERS, GAUGES, HISTOGRAMS, LABELLED, Metrics


def export_prometheus(metrics: Metrics, registry: Any = None, namespace: str = "ckpt_hf") -> Any:
    """Register ``metrics`` with a registry of ``prometheus_client``, which reads them when it is scraped.

    Args:
        metrics: the metrics of one engine.
        registry: a ``CollectorRegistry``; None for the process's own.
        namespace: what each name begins with; two engines of one registry need two.

    Returns:
        The collector, for ``registry.unregister``.

    Raises:
        CheckpointRuntimeError: ``prometheus_client`` is not installed.
        CheckpointValueError: the registry has metrics of this namespace already, and checks names as the process's
            own one does.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise CheckpointRuntimeError(
            "prometheus_client is not installed; pip install 'gdn-checkpoint[metrics]', or read Metrics.as_dict()"
        ) from error
    collector = _Collector(metrics, namespace)
    try:
        (REGISTRY if registry is None else registry).register(collector)
    except ValueError as error:
        # prometheus_client would list every name.
        raise CheckpointValueError(
            f"namespace {namespace!r} is taken in this registry; give another one, or unregister the collector that "
            "export_prometheus returned"
        ) from error
    return collector


class _Collector:
    def __init__(self, metrics: Metrics, namespace: str) -> None:
        self._metrics = metrics
        self._namespace = namespace

    def collect(self) -> Iterator[Any]:
        """One metric family a name, as ``prometheus_client`` asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        values = self._metrics.as_dict()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(self._name(name), text, value=values[name])
        for name, (label, text) in LABELLED.items():
            family = CounterMetricFamily(self._name(name), text, labels=[label])
            for value, count in values[name].items():
                family.add_metric([value], count)
            yield family
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(self._name(name), text, value=values[name])
        for name, (_, text) in HISTOGRAMS.items():
            histogram = values[name]
            yield HistogramMetricFamily(
                self._name(name), text, buckets=list(histogram["buckets"].items()), sum_value=histogram["sum"]
            )

    def _name(self, name: str) -> str:
        return f"{self._namespace}_{name}"

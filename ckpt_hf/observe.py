"""Ways to watch a patched model or an engine: metrics, a trace, and audits of its hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from .audit import Auditor
from .index import CheckpointStatus
from .metrics import Metrics
from .runner import ModelRunner, runner_of
from .trace_events import TraceWriter


def collect_metrics(target: Any) -> Metrics:
    """Count what happens from now on.

    Args:
        target: a patched model or an :class:`Engine`; both ``generate`` and the engine of one model are counted.

    Returns:
        Values that are kept up to date: ``as_dict()``, or :func:`export_prometheus`.
    """
    runner = _runner(target)
    metrics = Metrics()
    with runner.lock:
        if runner.started:
            ready = [c for c in runner.index.checkpoints if c.status is CheckpointStatus.READY]
            metrics.gauges["checkpoints"] = len(ready)
        runner.events.add(metrics)
    return metrics


def write_trace(target: Any, path: str | Path, buffered_events: int = 65536) -> TraceWriter:
    """Write every event from now on to ``path``, until the returned writer is closed; it is a context manager.

    Args:
        target: a patched model or an :class:`Engine`.
        path, buffered_events: as :class:`TraceWriter` takes them; ``python -m ckpt_hf.trace PATH`` draws the file.
    """
    runner = _runner(target)
    writer = TraceWriter(path, buffered_events, on_close=runner.events.remove)
    runner.events.add(writer)
    return writer


def audit_hits(
    target: Any,
    every: int = 1000,
    *,
    tolerance: float | None = None,
    on_failure: Literal["log", "raise"] = "log",
    seed: int = 0,
) -> Auditor:
    """From now on compute one hit in ``every`` again from scratch and compare; see :class:`Auditor`.

    Args:
        target: a patched model or an :class:`Engine`. It has one auditor; a new one takes its place.
        every, tolerance, on_failure, seed: as :class:`Auditor` takes them.
    """
    runner = _runner(target)
    auditor = Auditor(runner.model, every, tolerance=tolerance, on_failure=on_failure, seed=seed)
    with runner.lock:
        runner.auditor = auditor
    return auditor


def _runner(target: Any) -> ModelRunner:
    runner = getattr(target, "_runner", None)
    return runner if isinstance(runner, ModelRunner) else runner_of(target)

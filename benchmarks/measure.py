"""Timing: repeated calls, eager or as replayed CUDA graphs, and what they ran on.

A graph of one call also measures the launch of the graph itself, some ten microseconds. A graph of twenty calls, over
twenty, is what a call costs inside a model's graph, where one launch serves all layers. Both are reported. The twenty
calls read the same inputs, so what fits stays in the L2 cache, for every arm alike.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

Run = Callable[[], object]

EAGER, GRAPH = "eager", "graph, alone"
GRAPH_CALLS = 20
GRAPH_OF_MANY = f"graph, of {GRAPH_CALLS}"
MODES = (EAGER, GRAPH, GRAPH_OF_MANY)


PEER_PACKAGES = ("flash-linear-attention", "flashinfer-python", "nvidia-cutlass-dsl", "flash-qla", "tilelang")


@dataclass(frozen=True, slots=True)
class Timing:
    """Median, 10th and 90th percentile of one call, in microseconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summary of at least one sample."""
        micros = sorted(1e6 * second for second in seconds)
        if len(micros) == 1:
            return cls(micros[0], micros[0], micros[0])
        deciles = statistics.quantiles(micros, n=10, method="inclusive")
        return cls(statistics.median(micros), deciles[0], deciles[8])


@dataclass(frozen=True, slots=True)
class Timer:
    """How each arm is timed.

    Attributes:
        warmups, repetitions: untimed and timed calls.
        cold: write more than the GPU's L2 cache before each timed call, so that inputs come from device memory.
    """

    device: torch.device
    warmups: int = 5
    repetitions: int = 20
    cold: bool = False

    def eager(self, run: Run) -> Timing:
        """Wall time of a call between two synchronisations: host overhead and kernels."""
        for _ in range(self.warmups):
            run()
        samples = []
        for _ in range(self.repetitions):
            self._evict()
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            samples.append(time.perf_counter() - start)
        return Timing.of(samples)

    def graph(self, run: Run, calls: int = 1) -> Timing:
        """Device time of a call in a replay of ``calls`` of them, between two events: kernels without the host."""
        replay = capture(run, self.warmups, calls)
        for _ in range(self.warmups if calls == 1 else 1):
            replay()
        samples = []
        for _ in range(self.repetitions if calls == 1 else max(3, self.repetitions // 4)):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._evict()
            start.record()
            replay()
            stop.record()
            stop.synchronize()
            samples.append(start.elapsed_time(stop) / 1e3 / calls)
        return Timing.of(samples)

    def modes(self) -> dict[str, Callable[[Run], Timing]]:
        """The ways to time a call on this device; a graph of many calls cannot be cold."""
        if self.device.type != "cuda":
            return {EAGER: self.eager}
        modes: dict[str, Callable[[Run], Timing]] = {EAGER: self.eager, GRAPH: self.graph}
        if not self.cold:
            modes[GRAPH_OF_MANY] = partial(self.graph, calls=GRAPH_CALLS)
        return modes

    def settle(self, seconds: float = 0.5) -> None:
        """Keep the GPU busy for a while, so that its clocks are up before the first measurement."""
        if self.device.type != "cuda":
            return
        matrix = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            matrix @ matrix
            self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _evict(self) -> None:
        if self.cold and self.device.type == "cuda":
            torch.empty(2**28, dtype=torch.uint8, device=self.device).zero_()


def capture(run: Run, warmups: int = 3, calls: int = 1) -> Callable[[], None]:
    """Capture ``calls`` calls in a CUDA graph, after warming up on a side stream; calling the result replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(max(1, warmups)):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def environment(device: torch.device) -> dict[str, str]:
    """What a figure needs beside it: device, clocks, driver, versions and commit."""
    facts = {"device": _cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)}
    if device.type == "cpu":
        facts["threads"] = str(torch.get_num_threads())
    else:
        facts["clocks"] = _query_gpu("clocks.sm,clocks.max.sm,clocks.mem", device) or "unknown"
        facts["driver"] = _query_gpu("driver_version", device) or "unknown"
        facts["cuda"] = torch.version.cuda or "none"
    facts["python"] = platform.python_version()
    facts["torch"] = torch.__version__
    for package in ("triton", "transformers", *PEER_PACKAGES):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["commit"] = _commit()
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def _query_gpu(fields: str, device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={index}")


def _commit() -> str:
    root = str(Path(__file__).parent)
    commit = _output_of("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + (" with changes" if _output_of("git", "-C", root, "status", "--porcelain") else "")


def _output_of(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return ""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""

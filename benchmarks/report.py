"""Prints the benchmark's tables: ``python -m benchmarks.report``.

For each load and arm: median, 10th and 90th percentile in microseconds, how many times faster than the legacy way
(token by token, one call a request) in the same mode, and the relative error against fp64 that the arm showed before it
was timed. Then, for each load, two-phase prefill against each peer, the best way without sharing, and the time to copy
the bytes. An arm that is wrong is reported and not timed, and the command then exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import ARMS, BASELINE, Arm
from benchmarks.compare import compare, format_comparisons
from benchmarks.floors import bytes_moved, copy_bandwidth
from benchmarks.loads import CPU_LOADS, LONG_LOADS, QUARTER, SHARD, SHORT_LOADS, WHOLE_LAYER, Load, Shape, on_cpu
from benchmarks.measure import Timer, Timing, environment
from benchmarks.peers import PEERS, peer_arms
from benchmarks.pieces import TITLES as PIECE_TITLES
from benchmarks.pieces import measure_pieces
from benchmarks.tables import Row, format_table, make_rows
from benchmarks.workload import Workload


def measure_load(
    shape: Shape, load: Load, arms: tuple[type[Arm], ...], timer: Timer, seed: int, failures: list[str]
) -> list[Row]:
    """Check, then time, each arm on one load."""
    work = Workload(shape, load, timer.device, seed)
    timings: dict[tuple[str, str], tuple[Timing, float | None]] = {}
    for kind in arms:
        try:
            measure_arm(kind, work, timer, timings)
        except Exception as failure:  # a wrong result, no memory, or whatever a peer raises
            failures.append(f"{kind.title}: {load.name}: {type(failure).__name__}: {failure}")
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()  # long loads in full take most of the memory
    return make_rows(load.name, timings, BASELINE)


def measure_arm(
    kind: type[Arm], work: Workload, timer: Timer, timings: dict[tuple[str, str], tuple[Timing, float | None]]
) -> None:
    """Add one arm's timing and error in each mode; a mode that fails leaves those before it."""
    arm = kind(work)
    error = arm.check()
    for mode, time_it in timer.modes().items():
        timings[kind.name, mode] = time_it(arm.run), error


def plan(device: torch.device, long: bool) -> list[tuple[Shape, tuple[Load, ...]]]:
    """Which loads run in which shape on ``device``."""
    if device.type == "cpu":
        return [(on_cpu(WHOLE_LAYER), CPU_LOADS), (on_cpu(SHARD), CPU_LOADS)]
    loads = (*SHORT_LOADS, *(LONG_LOADS if long else ()))
    return [(WHOLE_LAYER, loads), (QUARTER, loads), (SHARD, SHORT_LOADS)]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line of ``python -m benchmarks.report``."""
    known = [arm.name for arm in ARMS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda[:N]")
    parser.add_argument("--arms", nargs="+", choices=known, default=known, metavar="ARM", help=", ".join(known))
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME", help="of 16/32, 4/8 and 4/8+conv on a GPU; all by default"
    )
    parser.add_argument("--long", action="store_true", help="on a GPU, the loads of 8192 tokens and more too")
    parser.add_argument("--cold", action="store_true", help="on a GPU, clear the L2 cache before each timed call")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=[*PEERS], metavar="PACKAGE", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument("--parts", action="store_true", help="single ops and other forests too, beside yardsticks")
    parser.add_argument("--no-loads", action="store_true", help="leave out the loads of Producers and Consumers")
    parser.add_argument("--no-model", action="store_true", help="leave out the embedded model")
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there as JSON too")
    options = parser.parse_args(arguments)
    if options.warmups < 1 or options.repetitions < 1:
        parser.error("--warmups and --repetitions must be at least 1")
    return options


def report_model(timer: Timer, seed: int, figures: dict[str, Any]) -> list[str]:
    """Time the embedded model and print its table; what was wrong."""
    try:
        from benchmarks.embedded import TITLES, measure_embedded
    except ImportError as missing:
        print(f"the embedded model is left out: {missing}")
        return []
    title = (
        "embedded model, whole generate calls; ratio against the unpatched model; error: share of answers that differ"
    )
    few = replace(timer, warmups=1, repetitions=max(1, timer.repetitions // 4))
    try:
        rows, failures = measure_embedded(few, seed)
    except RuntimeError as failure:
        return [f"embedded model: {failure}"]
    print(format_table(title, rows, TITLES))
    figures["tables"].append({"title": title, "rows": [asdict(row) for row in rows]})
    return failures


def report_loads(options: argparse.Namespace, timer: Timer, figures: dict[str, Any]) -> list[str]:
    """Time the arms on the loads of each shape and print their tables; what was wrong."""
    failures: list[str] = []
    bandwidth = copy_bandwidth(timer)
    figures["environment"]["copy bandwidth"] = f"{bandwidth / 1e9:.0f} GB/s read and written"
    print(f"floor: the bytes that must move, at the {bandwidth / 1e9:.0f} GB/s of a copy here\n")
    for shape, loads in plan(timer.device, options.long):
        if options.shapes and shape.name not in options.shapes:
            continue
        arms = tuple(arm for arm in ARMS if arm.name in options.arms)
        arms += peer_arms(shape, timer.device, options.peers)
        titles = {arm.name: arm.title for arm in arms}
        floors = {load.name: 1e6 * bytes_moved(shape, load) / bandwidth for load in loads}
        rows: list[Row] = []
        for load in loads:
            rows += measure_load(shape, load, arms, timer, options.seed, failures)
        comparisons = compare(rows, arms, floors)
        print(format_table(shape.title, rows, titles), end="\n\n")
        print(format_comparisons(shape.title, comparisons, titles), end="\n\n", flush=True)
        table = {"title": shape.title, "heads": [shape.heads_k, shape.heads_v], "conv_width": shape.conv_width}
        table |= {"consumers": {load.name: len(load.consumers) for load in loads}, "floors": floors}
        table |= {"rows": [asdict(row) for row in rows], "comparisons": [asdict(one) for one in comparisons]}
        figures["tables"].append(table)
        save(figures, options.json)
    return failures


def report_pieces(options: argparse.Namespace, timer: Timer, figures: dict[str, Any]) -> list[str]:
    """Time single ops beside their yardsticks and print their tables; what was wrong."""
    failures: list[str] = []
    shapes = (WHOLE_LAYER, QUARTER)
    for shape in shapes if timer.device.type == "cuda" else map(on_cpu, shapes):
        if options.shapes and shape.name not in options.shapes:
            continue
        rows = [row for rows in measure_pieces(shape, timer, options.seed, failures) for row in rows]
        title = (
            f"parts: H_k {shape.heads_k}, H_v {shape.heads_v}, D {shape.dim}; ratio: how many times faster than ours"
        )
        print(format_table(title, rows, PIECE_TITLES), end="\n\n", flush=True)
        figures["tables"].append({"title": title, "rows": [asdict(row) for row in rows]})
        save(figures, options.json)
    return failures


def save(figures: dict[str, Any], target: Path | None) -> None:
    """Write the figures so far, so that a later failure does not lose them."""
    if target is not None:
        target.write_text(json.dumps(figures, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run and print; 1 if an arm was wrong."""
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    if device.index is not None:
        torch.cuda.set_device(device)
    timer = Timer(device, options.warmups, options.repetitions, options.cold)
    facts = environment(device)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"{options.warmups} warm-ups, {options.repetitions} repetitions, seed {options.seed}; times in microseconds;")
    print("ratio: how many times faster than the token-serial kernel with one call a request, in the same mode\n")
    figures: dict[str, Any] = {"environment": facts, "tables": []}
    failures: list[str] = []
    with torch.inference_mode():
        timer.settle()
        if not options.no_loads:
            failures += report_loads(options, timer, figures)
        if options.parts:
            failures += report_pieces(options, timer, figures)
    if not options.no_model:
        failures += report_model(timer, options.seed, figures)
        save(figures, options.json)
    for failure in failures:
        print(f"not timed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

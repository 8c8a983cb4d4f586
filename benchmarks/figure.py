"""Draws time over the number of Consumers: ``python -m benchmarks.figure FILE.json ... --output docs/two_phase.png``.

The files are what ``python -m benchmarks.report --json`` wrote. Peers that had to run in processes of their own come in
files of their own, and two-phase prefill is then drawn from the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.arms import ARMS, BASELINE, Arm, TwoPhase
from benchmarks.measure import EAGER, GRAPH, GRAPH_CALLS, GRAPH_OF_MANY, MODES
from benchmarks.peers import PEERS

OURS, LEGACY, IN_FULL, FLOOR = "two-phase (this project)", "token by token, one call a request", "in full", "floor"
COLORS = {OURS: "#c1121f", LEGACY: "#444444", IN_FULL: "#8a8a8a", FLOOR: "#8f8f8f"}
PEER_COLORS = {"FLA": "#0a7d5a", "FlashQLA": "#7b4fb5", "FlashInfer": "#1565c0"}
HOW = {
    EAGER: "eager calls",
    GRAPH: "a CUDA graph of one call",
    GRAPH_OF_MANY: f"a CUDA graph of {GRAPH_CALLS} calls, over {GRAPH_CALLS}",
}
VERSIONS = {"FLA": "flash-linear-attention", "FlashQLA": "flash-qla", "FlashInfer": "flashinfer-python"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line: microseconds by number of Consumers."""

    name: str
    label: str
    color: str
    points: dict[int, float]


def collect(files: Sequence[dict[str, Any]], heads: tuple[int, int], mode: str) -> list[Line]:
    """Lines of the loads with one Producer of one length, of the bare delta rule with these heads, in ``mode``."""
    kinds: dict[str, type[Arm]] = {arm.name: arm for arms in (ARMS, *PEERS.values()) for arm in arms}
    best: dict[str, dict[int, float]] = {}
    versions: dict[str, str] = {}
    for figures in files:
        installed = figures["environment"]
        versions |= {
            project: installed[package] for project, package in VERSIONS.items() if installed[package][:1].isdigit()
        }
        seen: dict[str, dict[int, float]] = {}
        for table in _tables([figures], heads):
            loads = _one_prefix(table["consumers"])
            for load, count in loads.items():
                seen.setdefault(FLOOR, {})[count] = table["floors"][load]
            for row in table["rows"]:
                name = _line_of(kinds[row["arm"]])
                if row["load"] in loads and row["mode"] == mode and name is not None:
                    points, count = seen.setdefault(name, {}), loads[row["load"]]
                    points[count] = min(points.get(count, float("inf")), row["timing"]["median"])
        for name, points in seen.items():
            known = best.setdefault(name, {})
            for count, micros in points.items():
                known[count] = min(micros, known.get(count, micros)) if name == IN_FULL else known.get(count, micros)
    return [Line(name, _label(name, versions), _color(name), dict(sorted(best[name].items()))) for name in best]


def _tables(files: Sequence[dict[str, Any]], heads: tuple[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """The tables of the bare delta rule, with these heads."""
    for figures in files:
        for table in figures["tables"]:
            if table.get("conv_width") == 0 and heads in (None, tuple(table["heads"])):
                yield table


def _titles(table: dict[str, Any]) -> tuple[str, str]:
    """What the picture's loads have in common, and the layer's shape, in words."""
    loads = _one_prefix(table["consumers"])
    prefix, _, suffix = next(iter(loads)).partition(" + ")
    counts = f"{min(loads.values())} to {max(loads.values())} suffixes of {suffix.partition(' x ')[2]}"
    title = f"A shared prefix of {prefix.partition(' x ')[2]} tokens, continued by {counts}"
    return title, table["title"].partition(": ")[2]


def _held(files: Sequence[dict[str, Any]]) -> str:
    """The options that would draw something."""
    held = {
        (*table["heads"], row["mode"])
        for table in _tables(files)
        for row in table["rows"]
        if row["arm"] == TwoPhase.name
    }
    return (
        "; ".join(f"--heads {k} {v} --mode '{mode}'" for k, v, mode in sorted(held)) or "no table of two-phase prefill"
    )


def _one_prefix(consumers: dict[str, int]) -> dict[str, int]:
    """The loads of the largest family that differs in the number of Consumers alone."""
    families: dict[tuple[str, str], dict[str, int]] = {}
    for load, count in consumers.items():
        prefix, _, suffix = load.partition(" + ")
        families.setdefault((prefix, suffix.partition(" x ")[2]), {})[load] = count
    return max(families.values(), key=len)


def _line_of(arm: type[Arm]) -> str | None:
    if not arm.keeps_checkpoints:
        return IN_FULL
    if arm.project:
        return arm.project
    return {TwoPhase.name: OURS, BASELINE: LEGACY}.get(arm.name)


def _label(name: str, versions: dict[str, str]) -> str:
    labels = {IN_FULL: "best in full, nothing shared", FLOOR: "floor: the bytes, copied"}
    return labels.get(name, f"{name} {versions[name]}" if name in versions else name)


def _color(name: str) -> str:
    return {**COLORS, **PEER_COLORS}[name]


def draw(lines: Sequence[Line], title: str, subtitle: str, output: Path) -> None:
    """Write the picture; each line carries its name at its right end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.4), dpi=160)
    values = [micros for line in lines for micros in line.points.values()]
    bottom, top = min(values) / 1.35, max(values) * 1.35
    _scale(axes, sorted({count for line in lines for count in line.points}), bottom, top)
    for line in lines:
        _plot(axes, line, bottom)
    _name_ends(axes, lines, gap=(top / bottom) ** (1 / 22))
    axes.set_xlabel("Consumers of one prefix")
    axes.set_ylabel("microseconds (log)")
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.text(0, 1.025, subtitle, transform=axes.transAxes, fontsize=9, color="#555555")
    figure.tight_layout()
    figure.savefig(output, bbox_inches="tight")
    pyplot.close(figure)


def _scale(axes: Any, counts: Sequence[int], bottom: float, top: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(counts[0] / 1.15, counts[-1] * 1.08)
    axes.set_ylim(bottom, top)
    ticks = [n * 10**k for k in range(7) for n in (1, 2, 5)]
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if bottom <= tick <= top]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:.10g}"))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _plot(axes: Any, line: Line, bottom: float) -> None:
    counts, micros = list(line.points), list(line.points.values())
    if line.name == FLOOR:
        axes.fill_between(counts, micros, bottom, color=line.color, alpha=0.15, linewidth=0)
    ours = line.name == OURS
    axes.plot(
        counts,
        micros,
        color=line.color,
        linewidth=3 if ours else 1.6,
        linestyle="--" if line.name in (IN_FULL, FLOOR) else "-",
        marker=None if line.name == FLOOR else "o",
        markersize=6 if ours else 4,
        zorder=3 if ours else 2,
    )
    for count, value in line.points.items() if ours else ():
        style = {"color": line.color, "fontsize": 9, "fontweight": "bold", "ha": "center"}
        axes.annotate(f"{value:.0f}", (count, value), (0, -15), textcoords="offset points", **style)


def _name_ends(axes: Any, lines: Sequence[Line], gap: float) -> None:
    ends = [list(line.points.items())[-1] for line in lines]
    for line, (count, micros), place in zip(lines, ends, spread([y for _, y in ends], gap), strict=True):
        axes.annotate(
            f"{line.label}  {micros:.0f}",
            (count, micros),
            (max(x for x, _ in ends) * 1.14, place),
            color=line.color,
            va="center",
            fontsize=9,
            fontweight="bold" if line.name == OURS else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.color,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Places near ``heights``, in the same order, each at least a factor ``gap`` above the one below it."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    places = list(heights)
    for _ in range(200):  # pushes pairs apart by equal factors until all are
        moved = False
        for low, high in pairwise(order):
            if places[high] / places[low] < gap * 0.999:
                middle = (places[high] * places[low]) ** 0.5
                places[low], places[high], moved = middle / gap**0.5, middle * gap**0.5, True
        if not moved:
            break
    return places


def main(arguments: list[str] | None = None) -> int:
    """Draw; 1 if the files hold nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figure", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--output", type=Path, default=Path("docs/two_phase.png"))
    parser.add_argument("--heads", nargs=2, type=int, default=(16, 32), metavar=("H_K", "H_V"))
    parser.add_argument("--title", help="what the loads have in common by default")
    parser.add_argument(
        "--mode", choices=MODES, default=GRAPH_OF_MANY, metavar="MODE", help=f"one of {'; '.join(MODES)}"
    )
    options = parser.parse_args(arguments)
    files = [json.loads(path.read_text()) for path in options.files]
    heads = tuple(options.heads)
    lines = collect(files, heads, options.mode)
    if not any(line.name == OURS for line in lines):
        print(f"no times of {OURS} with heads {heads} in mode {options.mode!r}; here: {_held(files)}", file=sys.stderr)
        return 1
    title, shape = _titles(next(_tables(files, heads)))
    facts = f"{files[0]['environment']['device']}, one layer's delta rule: {shape}"
    draw(lines, options.title or title, f"{facts}; {HOW[options.mode]}", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

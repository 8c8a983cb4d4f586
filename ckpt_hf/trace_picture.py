"""A run as a picture: one row a request, arrows from a Producer to those who waited for it, steps and slots below."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from .errors import CheckpointRuntimeError
from .run_record import PhaseName, Run
from .trace_headline import amount, headline, seconds
from .trace_rows import MAX_ROWS, draw_rows

COLOURS: dict[PhaseName, str] = {
    "queued": "#dcdcdc",
    "deferred": "#f0b04a",
    "prefill": "#9dc3e6",
    "decode": "#7fc8a9",
    "preempted": "#d98880",
}
MEANINGS: dict[PhaseName, str] = {
    "queued": "queued, holds nothing",
    "deferred": "waits for a checkpoint",
    "prefill": "prefill, no part in this step",
    "decode": "decode",
    "preempted": "preempted",
}
_WIDTH, _PANELS, _ROW = 13.0, 3.4, 0.24
_SAMPLES = 600


def draw(run: Run, output: str | Path) -> None:
    """Draw ``run`` into the file ``output``, whose ending says the format (png, svg, pdf).

    Up to ``MAX_ROWS`` requests get a row each. Beyond that, the requests are counted by what they do over time, and the
    longest waits get the rows.

    Raises:
        CheckpointRuntimeError: matplotlib is not installed, or cannot write ``output``.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CheckpointRuntimeError(
            "matplotlib is not installed; pip install 'gdn-checkpoint[trace]', or read the summary without a picture"
        ) from error
    many = len(run.rows) > MAX_ROWS
    rows = len(run.rows) if not many else min(len(run.waits), 40)
    height = max(1.2, _ROW * rows if rows <= 60 else _ROW * 60 + 0.06 * (rows - 60))
    heights = [height, 1.1, 1.1] if not many else [2.6, height, 1.1, 1.1]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 2.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights}))
    figure.suptitle(fill(headline(run), 150), fontsize=11, x=0.01, ha="left")
    scale, unit = (1e3, "ms") if run.end < 2 else (1.0, "s")
    _legend(figure)
    if many:
        _draw_counts(axes.pop(0), run, scale)
    draw_rows(axes[0], run, scale, COLOURS, only_waits=40 if many else None)
    _draw_steps(axes[1], run, scale)
    _draw_slots(axes[2], run, scale)
    axes[-1].set_xlabel(f"time [{unit}]")
    axes[-1].set_xlim(0, max(run.end * scale, 1e-9))
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise CheckpointRuntimeError(f"output {str(output)!r} cannot be written: {error}") from error


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=COLOURS[name], label=text) for name, text in MEANINGS.items()]
    handles.append(Patch(facecolor="#1f5f99", label="prefill in this step"))
    handles.append(Line2D([], [], marker="D", color="#102a43", linestyle="", label="checkpoint ready"))
    handles.append(Line2D([], [], marker=">", color="#b35900", label="who waited for it"))
    handles.append(Line2D([], [], marker="x", color="#c0392b", linestyle="", label="failed or cancelled"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def _draw_counts(axis: Any, run: Run, scale: float) -> None:
    times = [run.end * i / _SAMPLES for i in range(_SAMPLES + 1)]
    counts = {name: [0] * len(times) for name in COLOURS}
    for row in run.rows.values():
        for phase in row.phases:
            first = -int(-phase.start * _SAMPLES // run.end) if run.end else 0
            for i in range(first, min(len(times), int(phase.stop * _SAMPLES / run.end) + 1 if run.end else 1)):
                if times[i] < phase.stop:
                    counts[phase.name][i] += 1
    axis.stackplot([t * scale for t in times], *counts.values(), colors=list(COLOURS.values()), step="post")
    axis.set_ylabel("requests")
    axis.set_ylim(0)


def _draw_steps(axis: Any, run: Run, scale: float) -> None:
    if run.steps:
        left = [bar.start * scale for bar in run.steps]
        width = [(bar.stop - bar.start) * scale for bar in run.steps]
        prefill = [bar.prefill for bar in run.steps]
        decode = [bar.decode for bar in run.steps]
        edge = {"align": "edge", "linewidth": 0.4 if len(run.steps) < 300 else 0, "edgecolor": "white"}
        axis.bar(left, prefill, width, color="#1f5f99", **edge)
        axis.bar(left, decode, width, bottom=prefill, color="#3a9d76", **edge)
        for bar in run.steps:
            if bar.failed:
                axis.axvspan(bar.start * scale, bar.stop * scale, color="#c0392b", alpha=0.3, linewidth=0)
        most = max(p + d for p, d in zip(prefill, decode, strict=True))
        busy = sum(bar.stop - bar.start for bar in run.steps)
        note = f"{len(run.steps):,} steps, the largest {most:,} tokens, {seconds(busy / len(run.steps))} on average"
        axis.set_title(note, fontsize=8, loc="left", color="#555555", pad=2)
    axis.set_ylabel("tokens\na step", fontsize=8)
    axis.set_ylim(0)


def _draw_slots(axis: Any, run: Run, scale: float) -> None:
    if run.slots:
        times = [at * scale for at, _, _ in run.slots] + [run.end * scale]
        used = [count for _, count, _ in run.slots]
        axis.step(times, [*used, used[-1]], where="post", color="#6c3483")
        axis.fill_between(times, [*used, used[-1]], step="post", color="#6c3483", alpha=0.15)
        top = max(run.slots, key=lambda sample: sample[2])
        evicted = sum(use.evictions for use in run.checkpoints.values())
        note = f"at most {max(used):,} slots, {amount(top[2])}; {evicted:,} evictions"
        axis.set_title(note, fontsize=8, loc="left", color="#555555", pad=2)
    axis.set_ylabel("slots\nused", fontsize=8)
    axis.set_ylim(0)

"""The rows of the picture: each request's phases, the pieces computed for it, and who waited for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .run_record import Phase, RequestRow, Run, Wait
from .trace_headline import seconds

MAX_ROWS = 300
_LABELLED_ROWS = 70
_EXAMPLES = 3
_SAME_TIME = 0.004
_GLYPH = 0.0062  # width of a character of a bar's label, as a share of the axis
_ENDED_WELL = ("eos", "length", "stop", "finished", "done", "prefilled")


def draw_rows(axis: Any, run: Run, scale: float, colours: Mapping[Any, str], only_waits: int | None = None) -> None:
    """Draw one row a request, Producers above those who start from what they compute.

    Args:
        axis: of matplotlib.
        run: the run.
        scale: from seconds to the axis' unit.
        colours: of the phases.
        only_waits: draw no more than this many requests, those that waited longest, and their Producers.
    """
    order = _order(run, only_waits)
    place = {row.request: y for y, row in enumerate(order)}
    labelled = len(order) <= _LABELLED_ROWS
    for y, row in enumerate(order):
        for phase in row.phases:
            hatch = {"hatch": "////", "edgecolor": "#c98a1b", "linewidth": 0} if phase.name == "deferred" else {}
            span = (phase.start * scale, phase.seconds * scale)
            axis.broken_barh([span], (y - 0.4, 0.8), facecolor=colours[phase.name], **hatch)
        pieces = [(p.start * scale, (p.stop - p.start) * scale) for p in row.pieces if p.last > p.first]
        axis.broken_barh(pieces, (y - 0.4, 0.8), facecolor="#1f5f99", linewidth=0.5, edgecolor="#9dc3e6")
        for at, _ in row.published:
            axis.plot(at * scale, y, marker="D", color="#102a43", markersize=4 if labelled else 2, zorder=5)
        if row.outcome is not None and row.outcome not in _ENDED_WELL:
            axis.plot(row.ended * scale, y, marker="x", color="#c0392b", markersize=6, zorder=5)
        if labelled:
            _label(axis, row, y, scale, run.end)
    _draw_waits(axis, [w for row in order for w in row.waits], place, scale, run.end)
    axis.set_ylim(len(order) - 0.4, -0.6)
    axis.set_ylabel("requests" if only_waits is None else "examples of the longest waits")
    step = 1 if labelled else -(-len(order) // 40)
    axis.set_yticks(range(0, len(order), step), [f"#{row.request}" for row in order[::step]], fontsize=7)


def _order(run: Run, only_waits: int | None) -> list[RequestRow]:
    """By arrival, but each request right below the one whose checkpoint it waited for or started from."""
    leader: dict[int, int] = {}
    for row in run.rows.values():
        use = run.checkpoints.get(row.started_from or "")
        producer = row.waits[-1].producer if row.waits else (use.producer if use is not None else None)
        if producer in run.rows and producer != row.request:
            leader[row.request] = producer
    rows = list(run.rows.values()) if only_waits is None else _examples(run, only_waits)

    def rank(row: RequestRow) -> tuple[tuple[float, int], ...]:
        path, seen = [(row.submitted, row.request)], {row.request}
        name = row.request
        while (name := leader.get(name, -1)) in run.rows and name not in seen:
            seen.add(name)
            path.append((run.rows[name].submitted, name))
        return tuple(reversed(path))

    return sorted(rows, key=rank)


def _examples(run: Run, count: int) -> list[RequestRow]:
    """At most ``count`` rows: the longest waits, a few of each Producer, and the Producers."""
    chosen: set[int] = set()
    of_producer: Counter[int | None] = Counter()
    for wait in run.waits:
        if of_producer[wait.producer] < _EXAMPLES:
            names = {n for n in (wait.request, wait.producer) if n in run.rows and n is not None}
            if len(chosen | names) > count:
                break
            of_producer[wait.producer] += 1
            chosen |= names
    return [run.rows[name] for name in chosen]


def _label(axis: Any, row: RequestRow, y: int, scale: float, end: float) -> None:
    for phase in row.phases:
        for text in _texts(row, phase):
            if len(text) * _GLYPH * end < phase.seconds:
                centre = (phase.start + phase.stop) / 2 * scale
                style = _on_dark() if phase.name == "prefill" else {"color": "#222222"}
                axis.text(centre, y, text, ha="center", va="center", fontsize=7, zorder=6, clip_on=True, **style)
                break
    if row.error:
        axis.text(row.ended * scale, y, f"  {row.error[:60]}", va="center", fontsize=7, color="#c0392b", zorder=6)


def _on_dark() -> dict[str, Any]:
    from matplotlib.patheffects import withStroke

    return {"color": "white", "path_effects": [withStroke(linewidth=2, foreground="#1f5f99")]}


def _texts(row: RequestRow, phase: Phase) -> list[str]:
    """What a bar may say, the longest first."""
    took = seconds(phase.seconds)
    if phase.wait is not None:
        producer = phase.wait.producer
        return [f"waited {took} for the checkpoint of #{producer}", f"{took} for #{producer}", took]
    if phase.name == "prefill":
        computed = f"{row.computed:,} computed"
        if row.cached:
            return [f"{row.cached:,} cached, {computed}", computed, f"{row.computed:,}"]
        missed = sorted(row.missed.items(), reverse=True)[:1]
        return [*(f"{computed} (boundary at {at:,}: {why})" for at, why in missed), computed, f"{row.computed:,}"]
    if phase.name == "decode":
        return [f"{row.generated:,} decoded", f"{row.generated:,}"] if row.generated is not None else []
    return [f"{phase.name} {took}", took]


def _draw_waits(axis: Any, waits: list[Wait], place: dict[int, int], scale: float, end: float) -> None:
    """A line down from the Producer's row at the time when others could go on, with an arrow head at each of them."""
    labelled = len(place) <= _LABELLED_ROWS
    style: dict[str, Any] = {"color": "#b35900", "zorder": 4, "linewidth": 1, "markersize": 4 if labelled else 2}
    for members in _together(waits, place, _SAME_TIME * end):
        producer, at = members[0].producer, max(wait.stop for wait in members) * scale
        assert producer is not None
        rows = [place[wait.request] for wait in members]
        axis.plot([at, at], [min(*rows, place[producer]), max(*rows, place[producer])], **style)
        axis.plot([at] * len(rows), rows, marker=">", **(style | {"linewidth": 0}))
        if not labelled and len(members) > 3:
            text = f"  {len(members)} waited up to {seconds(max(w.seconds for w in members))} for #{producer}"
            place_text = {"ha": "left" if at < 0.7 * end * scale else "right", "va": "center", "zorder": 6}
            axis.text(at, max(rows) - 1, text, fontsize=7, color="#6e3600", **place_text, **_on_light())


def _together(waits: list[Wait], place: dict[int, int], gap: float) -> list[list[Wait]]:
    """Waits for the same checkpoint that ended at the same time, but for ``gap`` from one to the next."""
    groups: list[list[Wait]] = []
    drawn = [wait for wait in waits if wait.producer in place and wait.seconds > 0]
    for wait in sorted(drawn, key=lambda w: (w.producer or 0, w.key, w.stop)):
        last = groups[-1][-1] if groups else None
        if last and (last.producer, last.key) == (wait.producer, wait.key) and wait.stop - last.stop <= gap:
            groups[-1].append(wait)
        else:
            groups.append([wait])
    return groups


def _on_light() -> dict[str, Any]:
    from matplotlib.patheffects import withStroke

    return {"path_effects": [withStroke(linewidth=2, foreground="white")]}

"""What the tables are for: two-phase prefill against each peer, against the best way without sharing, and the floor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.arms import Arm, TwoPhase
from benchmarks.tables import Row


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest of some arms: its name, median in microseconds, error against fp64, and its time over two-phase's."""

    arm: str
    median: float
    error: float | None
    ratio: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load in one mode.

    Attributes:
        median, error: two-phase prefill's, in microseconds and against fp64.
        peers: for each project the best of its arms that share prefixes.
        in_full: the best arm, ours or a peer's, that runs every prompt in full; None where none ran.
        floor: microseconds that moving the bytes takes, see :mod:`benchmarks.floors`.
    """

    load: str
    mode: str
    median: float
    error: float | None
    peers: dict[str, Best]
    in_full: Best | None
    floor: float


def compare(rows: Sequence[Row], arms: Iterable[type[Arm]], floors: Mapping[str, float]) -> list[Comparison]:
    """Comparisons of each (load, mode) in which two-phase prefill ran; ``floors``: microseconds of each load."""
    kinds = {arm.name: arm for arm in arms}
    comparisons = []
    for ours in rows:
        if ours.arm != TwoPhase.name:
            continue
        beside = [row for row in rows if (row.load, row.mode) == (ours.load, ours.mode) and row.arm in kinds]
        shared = [row for row in beside if kinds[row.arm].keeps_checkpoints]
        projects = dict.fromkeys(kinds[row.arm].project for row in shared if kinds[row.arm].project)
        peers = {
            project: _best([row for row in shared if kinds[row.arm].project == project], ours) for project in projects
        }
        in_full = [row for row in beside if not kinds[row.arm].keeps_checkpoints]
        comparisons.append(
            Comparison(
                ours.load,
                ours.mode,
                ours.timing.median,
                ours.error,
                peers,
                _best(in_full, ours) if in_full else None,
                floors[ours.load],
            )
        )
    return comparisons


def _best(rows: Sequence[Row], ours: Row) -> Best:
    row = min(rows, key=lambda row: row.timing.median)
    return Best(row.arm, row.timing.median, row.error, row.timing.median / ours.timing.median)


def format_comparisons(title: str, comparisons: Sequence[Comparison], titles: Mapping[str, str]) -> str:
    """A plain text table; of each other way its time, how many times two-phase's that is, and its error."""
    projects = list(dict.fromkeys(project for comparison in comparisons for project in comparison.peers))
    head = f"{'load':<18}  {'mode':<12}  {'two-phase':>9}  {'error':>7}  {'floor':>7} {'share':>5}"
    head += "".join(f"  {project:>23}" for project in projects) + f"  {'best in full':>23}"
    lines = [f"two-phase prefill against the others, {title}", head, "-" * len(head)]
    for one in comparisons:
        line = f"{one.load:<18}  {one.mode:<12}  {one.median:>9.1f}  {one.error:>7.1e}  {one.floor:>7.1f} "
        line += f"{one.floor / one.median:>5.0%}"
        others = [*(one.peers.get(project) for project in projects), one.in_full]
        lines.append(line + "".join(f"  {_cell(best):>23}" for best in others))
    used = dict.fromkeys(
        best.arm for one in comparisons for best in (*one.peers.values(), one.in_full) if best is not None
    )
    lines.append("best of their arms: " + "; ".join(titles[arm] for arm in used))
    lines.append("x: their time over two-phase's, then their error against fp64; share: floor over two-phase's time")
    return "\n".join(lines)


def _cell(best: Best | None) -> str:
    return "-" if best is None else f"{best.median:.1f} x{best.ratio:.2f} {best.error:.1e}"

"""The rows of the report and their plain text form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.measure import Timing


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        ratio: the baseline's median over this one's, None where the baseline did not run.
        error: what the arm's check found before it was timed: the relative error against fp64, or the share of
            answers that differ from the baseline's. None for a yardstick, which is not checked.
    """

    load: str
    arm: str
    mode: str
    timing: Timing
    ratio: float | None
    error: float | None


def make_rows(load: str, results: Mapping[tuple[str, str], tuple[Timing, float | None]], baseline: str) -> list[Row]:
    """Rows of one load from the timing and error of each (arm, mode), with ratios against ``baseline`` in its mode."""
    rows = []
    for (arm, mode), (timing, error) in results.items():
        base = results.get((baseline, mode))
        rows.append(Row(load, arm, mode, timing, base[0].median / timing.median if base else None, error))
    return rows


def format_table(title: str, rows: list[Row], titles: Mapping[str, str]) -> str:
    """A plain text table, one line a row; ``titles`` names the arms."""
    head = f"{'load':<18}  {'arm':<42}  {'mode':<12}  {'median':>11}  {'p10':>11}  {'p90':>11}  {'ratio':>7}  error"
    lines = [title, head, "-" * len(head)]
    for row in rows:
        times = "  ".join(f"{micros:>11.1f}" for micros in (row.timing.median, row.timing.p10, row.timing.p90))
        ratio = f"{row.ratio:>7.2f}" if row.ratio is not None else f"{'-':>7}"
        error = "-" if row.error is None else f"{row.error:.1e}"
        lines.append(f"{row.load:<18}  {titles[row.arm]:<42}  {row.mode:<12}  {times}  {ratio}  {error}")
    return "\n".join(lines)

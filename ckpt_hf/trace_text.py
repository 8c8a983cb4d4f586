"""A run as tables: what was saved, who waited for what, which checkpoints paid, and why boundaries were missed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from .reasons import Reason
from .run_record import Run
from .trace_headline import amount, headline, quantile, seconds, why_waited

_LISTED = 10


def summary(run: Run, lost: int = 0, unreadable: int = 0) -> ConsoleRenderable:
    """The tables of ``run``, for ``rich``; ``lost`` and ``unreadable`` are events that the trace lacks."""
    parts: list[ConsoleRenderable] = [Text(headline(run), style="bold")]
    if lost or unreadable:
        parts.append(Text(f"{lost:,} events were lost and {unreadable:,} lines unreadable: figures are too low", "red"))
    parts += [_figures(run), _waits(run), _missed(run), _checkpoints(run)]
    return Group(*(part for part in parts if not isinstance(part, Table) or part.row_count))


def print_summary(run: Run, console: Console | None = None, lost: int = 0, unreadable: int = 0) -> None:
    """Print :func:`summary`; to the terminal without a ``console``."""
    (console or Console()).print(summary(run, lost, unreadable))


def _figures(run: Run) -> Table:
    rows = run.rows.values()
    table = Table(show_header=False, box=None, pad_edge=False)
    outcomes = Counter(row.outcome or "not ended" for row in rows)
    table.add_row("requests", ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common()))
    committed = [bar for bar in run.steps if not bar.failed]
    busy = sum(bar.stop - bar.start for bar in run.steps)
    share = busy / run.end if run.end else 0.0
    failed = len(run.steps) - len(committed)
    table.add_row(
        "steps", f"{len(committed):,} committed, {failed:,} failed; the model was busy {share:.0%} of the time"
    )
    prefill, decode = sum(bar.prefill for bar in committed), sum(bar.decode for bar in committed)
    table.add_row("tokens", f"{prefill:,} prefill, {decode:,} decode")
    table.add_row("time to first token", _quantiles(r.first_token - r.submitted for r in rows if r.first_token))
    table.add_row("queued", _quantiles(row.seconds_in("queued", "preempted") for row in rows))
    table.add_row("waited for a checkpoint", _quantiles(row.seconds_in("deferred") for row in rows if row.waits))
    evicted = sum(use.evictions for use in run.checkpoints.values())
    table.add_row("evictions, preemptions", f"{evicted:,}, {run.preemptions:,}")
    if run.slots:
        most = max(used for _, used, _ in run.slots)
        table.add_row("memory", f"at most {most:,} slots, {amount(max(held for *_, held in run.slots))}")
    return table


def _quantiles(values: Iterable[float]) -> str:
    found = sorted(values)
    shares = ((0.5, "median"), (0.95, "95 %"), (1.0, "longest"))
    return ", ".join(f"{name} {seconds(quantile(found, share) or 0.0)}" for share, name in shares) if found else "none"


def _waits(run: Run) -> Table:
    table = Table(title="What requests waited for", title_justify="left", box=None, pad_edge=False)
    for heading in ("waited for", "requests", "longest", "of", "meanwhile"):
        table.add_column(heading, justify="left" if heading in ("waited for", "meanwhile") else "right")
    causes: defaultdict[str, list[tuple[float, int, str]]] = defaultdict(list)
    for row in run.rows.values():
        for took, why in why_waited(run, row):
            if took > 0:
                causes[why.partition(":")[0]].append((took, row.request, why.partition(":")[2]))
    for name, waits in sorted(causes.items(), key=lambda item: -max(item[1])[0])[:_LISTED]:
        took, request, detail = max(waits)
        table.add_row(name, f"{len(waits):,}", seconds(took), f"#{request}", detail)
    return table


def _missed(run: Run) -> Table:
    table = Table(title="Boundaries not started from", title_justify="left", box=None, pad_edge=False)
    for heading in ("reason", "boundaries", "tokens", "what it means"):
        table.add_column(heading, justify="right" if heading in ("boundaries", "tokens") else "left")
    counts: Counter[str] = Counter()
    tokens: defaultdict[str, int] = defaultdict(int)
    for row in run.rows.values():
        for position, reason in row.missed.items():
            if position > row.cached:
                counts[reason] += 1
        worst = max((position for position in row.missed if position > row.cached), default=None)
        if worst is not None:
            tokens[row.missed[worst]] += worst - row.cached
    meanings = {reason.value: reason.explanation for reason in Reason}
    for name, count in counts.most_common():
        table.add_row(name, f"{count:,}", f"{tokens[name]:,}", meanings.get(name, ""))
    return table


def _checkpoints(run: Run) -> Table:
    table = Table(title="Checkpoints by tokens saved", title_justify="left", box=None, pad_edge=False)
    for heading in ("checkpoint", "tokens", "computed by", "started from by", "tokens saved", "evicted"):
        table.add_column(heading, justify="left" if heading == "checkpoint" else "right")
    for use in sorted(run.checkpoints.values(), key=lambda use: -use.tokens * len(use.consumers))[:_LISTED]:
        saved = use.tokens * len(use.consumers)
        producer = "before" if use.producer is None else f"#{use.producer}"
        consumers = f"{len(use.consumers):,} requests"
        table.add_row(use.key[:12], f"{use.tokens:,}", producer, consumers, f"{saved:,}", f"{use.evictions:,} x")
    return table

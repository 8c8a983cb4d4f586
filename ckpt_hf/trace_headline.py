"""What a run comes down to, in numbers and in words: for the picture's title and for the summary."""

from __future__ import annotations

from collections.abc import Iterable

from .run_record import RequestRow, Run

_FULL = 0.9
_CHUNK = 64
"""Tokens below which what is left of a step is of no use to a prompt: pieces are cut on the grid of the recurrence."""


def seconds(value: float) -> str:
    """A duration as people read it."""
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def amount(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.0f} GiB" if count >= 100 else f"{count:.3g} GiB"


def headline(run: Run) -> str:
    """A few sentences: how much was saved, who waited longest for whom, and who was queued longest for what."""
    prompt = sum(row.prompt_tokens for row in run.rows.values())
    cached = sum(min(row.cached, row.prompt_tokens) for row in run.rows.values())
    parts = [f"{len(run.rows):,} requests in {seconds(run.end)}"]
    if prompt:
        parts.append(f"{cached:,} of {prompt:,} prompt tokens ({cached / prompt:.0%}) came from checkpoints")
    text = ": ".join(parts) + ". "
    waits = [wait for wait in run.waits if wait.seconds > 0]
    if waits:
        longest = waits[0]
        text += f"{len({w.request for w in waits}):,} waited for a checkpoint, the longest {seconds(longest.seconds)}: "
        text += f"#{longest.request} for #{longest.producer}."
    else:
        text += "Nobody waited for a checkpoint."
    queued = max(run.rows.values(), key=lambda row: row.seconds_in("queued", "preempted"), default=None)
    if queued is not None and (longest_queue := queued.seconds_in("queued", "preempted")) > 0.02 * run.end:
        why = max((cause for cause in why_waited(run, queued) if "checkpoint" not in cause[1]), default=(0.0, ""))[1]
        text += f" #{queued.request} was queued longest, {seconds(longest_queue)}, for {why}."
    return text


def why_waited(run: Run, row: RequestRow) -> list[tuple[float, str]]:
    """Each time before or between a request's work, in seconds, and what it waited for."""
    found = []
    for phase in row.phases:
        if phase.wait is not None:
            found.append((phase.seconds, f"checkpoint {phase.wait.key[:6]} of request #{phase.wait.producer}"))
        elif phase.name in ("queued", "preempted") and phase.seconds > 0:
            found.append((phase.seconds, _why_not_admitted(run, phase.start, phase.stop, phase.name == "preempted")))
    return found


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value with at least ``share`` of all values at or below it; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))] if ordered else None


def _why_not_admitted(run: Run, start: float, stop: float, preempted: bool) -> str:
    """The steps that ran meanwhile tell: full ones left no tokens, others were held back by slots or memory."""
    meanwhile = [bar for bar in run.steps if bar.start < stop and bar.stop > start]
    most = max((bar.prefill + bar.decode for bar in run.steps), default=0)
    full = sum(bar.prefill + bar.decode > min(_FULL * most, most - _CHUNK) for bar in meanwhile)
    lead = "preempted, then " if preempted else ""
    if not meanwhile:
        return f"{lead}the next step to be planned"
    if len(meanwhile) == 1:
        return f"{lead}the running step to end"
    if 2 * full >= len(meanwhile):
        return f"{lead}room in a step: {full} of {len(meanwhile)} steps were full"
    return f"{lead}a slot or memory: {len(meanwhile) - full} of {len(meanwhile)} steps were not full"

"""From the events of a trace to the record of the run."""

from __future__ import annotations

from collections.abc import Iterable

from .events import Event
from .run_record import CheckpointUse, Phase, PhaseName, PieceBar, RequestRow, Run, StepBar, Wait
from .trace_events import TimedEvent


def read_run(events: Iterable[TimedEvent]) -> Run:
    """The run that ``events``, in order of time, tell of. Events of unknown requests are ignored."""
    reader = _Reader()
    for timed in events:
        reader.take(timed.time, timed.event)
    return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self.run = Run()
        self._open_steps: dict[int, StepBar] = {}
        self._planned: dict[int, list[tuple[int, int, int]]] = {}
        self._waiting: dict[str, list[int]] = {}

    def take(self, at: float, event: Event) -> None:
        """One event."""
        self.run.end = max(self.run.end, at)
        if event.kind == "submitted":
            assert event.request is not None
            tokens = event.data["prompt_tokens"]
            phases = [Phase("queued", at, at)]
            self.run.rows[event.request] = RequestRow(event.request, at, tokens, at, tokens, phases)
        elif event.kind in ("step", "piece", "decode", "slots"):
            self._take_step(at, event)
        elif event.kind in ("reserved", "published", "dropped", "evicted"):
            self._take_checkpoint(at, event)
        elif event.kind == "failed" and event.request is None:
            self._close_step(at, event.step, failed=True)
        elif event.request is not None and (row := self.run.rows.get(event.request)) and row.outcome is None:
            self._take_request(at, event, row)

    def finish(self) -> Run:
        """The run, its open ends cut at the last event."""
        for row in self.run.rows.values():
            if row.outcome is None:
                self._enter(row, None, self.run.end)
        for step in list(self._open_steps):
            self._close_step(self.run.end, step, failed=True)
        self.run.steps.sort(key=lambda bar: bar.start)
        return self.run

    def _take_request(self, at: float, event: Event, row: RequestRow) -> None:
        if event.kind == "deferred":
            self._enter(row, "deferred", at)
            wait = Wait(row.request, event.data["producer"], str(event.data["key"]), at, at)
            row.phases[-1].wait = wait
            row.waits.append(wait)
            self._waiting.setdefault(wait.key, []).append(row.request)
        elif event.kind == "missed":
            row.missed[int(event.data["position"])] = str(event.data["reason"])
        elif event.kind == "started":
            self._start(row, event, at)
        elif event.kind == "preempted":
            self.run.preemptions += 1
            row.resumes_at = max(row.resumes_at, event.data["position"])
            self._enter(row, "preempted", at)
        elif event.kind == "failed":
            row.error = str(event.data["error"])
        elif event.kind == "finished":
            row.outcome, row.ended = str(event.data["reason"]), at
            row.generated = event.data.get("generated")
            self._enter(row, None, at)

    def _start(self, row: RequestRow, event: Event, at: float) -> None:
        row.cached = event.data["cached"]
        key = event.data.get("key") or (row.waits[-1].key if row.waits and row.cached else None)
        row.started_from = key if row.cached else None
        self._enter(row, "prefill", at)
        use = self.run.checkpoints.get(row.started_from or "")
        if use is not None and row.request not in use.consumers:
            use.consumers.append(row.request)

    def _enter(self, row: RequestRow, name: PhaseName | None, at: float) -> None:
        """End the current phase, and the wait if it was one, and begin the next; None ends the row."""
        last = row.phases[-1]
        last.stop = row.ended = at
        if last.wait is not None:
            last.wait.stop = at
        if name is not None:
            row.phases.append(Phase(name, at, at))

    def _take_checkpoint(self, at: float, event: Event) -> None:
        key, tokens = str(event.data["key"]), event.data["tokens"]
        use = self.run.checkpoints.setdefault(key, CheckpointUse(key, tokens))
        if event.kind in ("published", "dropped"):
            self._wake(key, at)
        if event.kind == "evicted":
            use.evictions += 1
        elif event.kind != "dropped":
            use.producer = event.request
        if event.kind == "published":
            use.published = at
            if event.request in self.run.rows:
                self.run.rows[event.request].published.append((at, tokens))

    def _wake(self, key: str, at: float) -> None:
        """Who waited for ``key`` waits for nobody any more, only for its turn."""
        for request in self._waiting.pop(key, []):
            row = self.run.rows[request]
            if row.phases[-1].name == "deferred" and row.waits[-1].key == key:
                self._enter(row, "queued", at)

    def _take_step(self, at: float, event: Event) -> None:
        if event.kind == "slots":
            self.run.slots.append((at, event.data["used"], event.data["bytes"]))
            return
        if event.kind == "step" and event.data["phase"] == "end":
            bar = self._open_steps.get(event.step)
            planned = bar is not None and bar.prefill + bar.decode > 0
            self._close_step(at, event.step, failed=planned and not event.data["tokens"])
            return
        bar = self._open_steps.setdefault(event.step, StepBar(event.step, at, at))
        if event.kind == "step":
            bar.start = at  # planning may have been long before, while another step ran
        elif event.kind == "decode":
            bar.decode += event.data["count"]
        elif event.request is not None:
            first, last = event.data["start"], event.data["stop"]
            bar.prefill += last - first
            self._planned.setdefault(event.step, []).append((event.request, first, last))

    def _close_step(self, at: float, step: int, failed: bool) -> None:
        bar = self._open_steps.pop(step, None)
        pieces = self._planned.pop(step, [])
        if bar is None:
            return
        bar.stop, bar.failed = at, failed
        self.run.steps.append(bar)
        for request, first, last in pieces if not failed else ():
            row = self.run.rows.get(request)
            if row is None:
                continue
            row.pieces.append(PieceBar(bar.start, at, first, last))
            if last < row.resumes_at:
                continue
            row.first_token = at if row.first_token is None else row.first_token
            if row.outcome is None and row.phases[-1].name == "prefill":
                self._enter(row, "decode", at)

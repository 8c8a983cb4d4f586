"""One step of a patched model, for all who have requests.

Whoever needs progress takes the runner's lock and runs a step: a ``generate`` call for itself, an engine for its
handles. A step serves the requests of all of them, and hands each one's logits to its sink.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import CheckpointRuntimeError
from .events import Event
from .packed_step import is_alive, requests_of, run_plan
from .plan import StepPlan
from .requests import Request
from .runner import ModelRunner


def run_step(runner: ModelRunner) -> bool:
    """Plan a step, run it and hand out its logits; False when there is nothing to do.

    A step that fails ends the requests that were in it, with the error told to their sinks; where memory was short, it
    is tried again with less (``recovery.py``). An interrupt is raised, with the step undone.
    """
    with runner.lock:
        runner.refuse_within_step()
        with runner.bookkeeping():
            plan = _next_plan(runner)
        ended = _tell_ended(runner)
        if plan is None:
            return ended
        runner.running = True
        try:
            logits = _execute(runner, plan)
            if logits is not None:
                _audit(runner, logits)
                runner.sinks.hand_out(logits, runner.lose)
        finally:
            runner.running = False
        return True


def prepare_step(runner: ModelRunner) -> None:
    """Plan the next step now, while the device computes this one, which must have been committed.

    Requests whose token is not known yet take part with a stand-in, to be replaced before the step runs. Rows that
    wait for each other get no stand-ins, so with them around planning waits until their tokens are there.
    """
    if runner.started and runner.prepared is None and not runner.sinks.lockstep:
        with runner.bookkeeping():
            runner.prepared = _plan(runner)


def _next_plan(runner: ModelRunner) -> StepPlan | None:
    prepared, runner.prepared = runner.prepared, None
    if prepared is None or not runner.started:
        return _plan(runner)
    if is_alive(prepared):
        return prepared
    runner.scheduler.rollback(prepared)
    return _plan(runner)


def _plan(runner: ModelRunner) -> StepPlan | None:
    if not runner.started:
        return None
    runner.memory.running.set_lockstep(len(runner.sinks.lockstep))
    return runner.scheduler.plan_step()


def _tell_ended(runner: ModelRunner) -> bool:
    """Tell whom the scheduler has ended for lack of memory; whether there was anybody."""
    if not runner.started or not runner.scheduler.ended:
        return False
    ended = list(runner.scheduler.ended)
    runner.scheduler.ended.clear()
    error = CheckpointRuntimeError("the request needs more memory than memory_bytes allows")
    runner.lose(ended, error)
    return True


def _execute(runner: ModelRunner, plan: StepPlan) -> dict[Request, Tensor] | None:
    """The logits of a step that has been committed; None when it was undone."""
    try:
        logits = run_plan(runner.model, runner.memory, plan)
    except BaseException as error:
        with runner.bookkeeping():
            runner.scheduler.rollback(plan)
        if not isinstance(error, Exception):
            raise
        _handle_failure(runner, plan, error)
        return None
    runner.recovery.succeeded(runner.memory)
    with runner.bookkeeping():
        runner.scheduler.commit(plan)
    runner.stats.prefill_steps += bool(plan.pieces)
    runner.stats.decode_steps += bool(plan.decodes)
    return logits


def _handle_failure(runner: ModelRunner, plan: StepPlan, error: Exception) -> None:
    """The step has been undone; end those that cannot go on."""
    runner.events(Event("failed", runner.scheduler.step, None, {"error": repr(error)}))
    if isinstance(error, torch.OutOfMemoryError):
        with runner.bookkeeping():
            victim = runner.recovery.make_room(runner.memory, plan, runner.sinks.lockstep)
        runner.lose([] if victim is None else [victim], error)
    else:
        runner.lose(requests_of(plan), error)


def _audit(runner: ModelRunner, logits: dict[Request, Tensor]) -> None:
    if runner.auditor is not None:
        states = runner.memory.states
        runner.auditor.check(logits.items(), states, lambda request, error: runner.lose([request], error))

"""Events, their sinks, and the words for a miss."""

from __future__ import annotations

import logging

import pytest

from ckpt_hf.events import FIELDS, Event, EventSinks, short_key
from ckpt_hf.reasons import Reason, for_caller

EVENT = Event("evicted", 3, None, {"key": "ab", "tokens": 5})


def test_every_sink_gets_every_event_in_order() -> None:
    first: list[Event] = []
    second: list[Event] = []
    sinks = EventSinks(first.append)
    sinks(EVENT)
    sinks.add(second.append)
    sinks(EVENT)
    sinks.remove(first.append)
    sinks(EVENT)
    assert (first, second) == ([EVENT] * 2, [EVENT] * 2)
    sinks.remove(second.append)
    assert not sinks


def test_a_sink_that_raises_is_removed_and_nobody_else_notices(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    calls = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise OSError("disk full")

    sinks = EventSinks(broken, seen.append)
    with caplog.at_level(logging.WARNING):
        sinks(EVENT)
        sinks(EVENT)
    assert len(calls) == 1 and len(seen) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_keys_are_short_and_tell_keys_apart() -> None:
    assert short_key(bytes(range(32))) == "000102030405"
    assert short_key(b"\1" * 32) != short_key(b"\2" * 32)


def test_no_kind_names_a_salt() -> None:
    assert not [kind for kind, fields in FIELDS.items() if "salt" in fields]


@pytest.mark.parametrize("reason", list(Reason))
def test_a_caller_never_reads_of_another_one(reason: Reason) -> None:
    told = for_caller(reason)
    assert told == for_caller(reason.value)
    assert told == ("never seen" if reason is Reason.OTHER_CALLER else reason.value)
    assert reason.explanation and f"{reason}" == reason.value


def test_a_reason_from_elsewhere_passes() -> None:
    assert for_caller("the prompt was rejected") == "the prompt was rejected"

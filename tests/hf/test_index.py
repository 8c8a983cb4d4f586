"""Checkpoints by key: the transition table, what is evicted first, what never is, and what the index counts."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_hf.checkpoint import CHECKPOINT_TRANSITIONS, Retention
from ckpt_hf.errors import CheckpointRuntimeError
from ckpt_hf.index import Checkpoint, CheckpointIndex, CheckpointLimits, CheckpointStatus
from ckpt_hf.kv import KVRows, KVSegment
from ckpt_hf.slots import SlotAllocator

UNREADY, READY, ABSENT = CheckpointStatus.UNREADY, CheckpointStatus.READY, CheckpointStatus.ABSENT
EPHEMERAL, SOFT, DECLARED = Retention
LEGAL = {(UNREADY, READY), (UNREADY, ABSENT), (READY, ABSENT)}


def index_of(slots: int | None = None, max_bytes: int | None = None) -> CheckpointIndex:
    """An index whose states take 100 bytes, whose tokens take 1 and whose logits take their own value."""
    limits = CheckpointLimits(slots, max_bytes, 100, 1, lambda logits: int(logits))
    return CheckpointIndex(SlotAllocator(), KVRows(), limits)


def ready(
    index: CheckpointIndex, name: str, length: int = 4, parent: KVSegment | None = None, **fields: Any
) -> Checkpoint:
    """A published checkpoint of ``length`` tokens after ``parent``."""
    before = sum(map(len, parent.path())) if parent is not None else 0
    retention = fields.pop("retention", Retention.DECLARED)
    checkpoint = index.reserve(name.encode(), [ord(name[0])] * (before + length), 1, retention)
    assert checkpoint is not None
    checkpoint.logits = fields.pop("logits", None)
    checkpoint.slot = index.slots.acquire(checkpoint.key)
    checkpoint.kv = index.kv_rows.new_segment(parent)
    index.kv_rows.extend(checkpoint.kv, length)
    index.publish(checkpoint)
    for field, value in fields.items():
        setattr(checkpoint, field, value)
    return checkpoint


def names(index: CheckpointIndex) -> set[str]:
    return {checkpoint.key.decode() for checkpoint in index.checkpoints}


@pytest.mark.parametrize("before", CheckpointStatus)
@pytest.mark.parametrize("after", CheckpointStatus)
def test_transition_table(before: CheckpointStatus, after: CheckpointStatus) -> None:
    checkpoint = Checkpoint(b"\xab\xcd", (1,), producer=1, status=before)
    assert (after in CHECKPOINT_TRANSITIONS[before]) == ((before, after) in LEGAL)
    if (before, after) in LEGAL:
        checkpoint.move(after)
        assert checkpoint.status is after
    else:
        with pytest.raises(CheckpointRuntimeError, match=f"abcd cannot go from {before.value} to {after.value}"):
            checkpoint.move(after)
        assert checkpoint.status is before


def test_find_compares_the_tokens() -> None:
    index = index_of()
    checkpoint = ready(index, "a")
    assert index.find(b"a", [97] * 4) is checkpoint
    assert index.find(b"a", [97] * 3) is None
    assert index.find(b"a", [97, 97, 97, 98]) is None
    assert index.find(b"b", [97] * 4) is None


def test_one_reservation_a_key() -> None:
    index = index_of()
    first = index.reserve(b"a", [1], 1)
    assert first is not None
    assert index.reserve(b"a", [2], 2) is None
    index.drop(first)
    assert first.status is ABSENT
    assert index.reserve(b"a", [2], 2) is not None


@pytest.mark.parametrize("missing", ["slot", "kv"])
def test_nothing_is_published_without_states(missing: str) -> None:
    index = index_of()
    checkpoint = index.reserve(b"a", [1], 1)
    assert checkpoint is not None
    checkpoint.slot, checkpoint.kv = index.slots.acquire(b"a"), index.kv_rows.new_segment(None)
    setattr(checkpoint, missing, None)
    with pytest.raises(CheckpointRuntimeError, match="no states to publish"):
        index.publish(checkpoint)
    assert checkpoint.status is UNREADY


def test_published_once() -> None:
    index = index_of()
    checkpoint = ready(index, "a")
    with pytest.raises(CheckpointRuntimeError, match="from ready to ready"):
        index.publish(checkpoint)


def test_drop_frees_everything_and_only_once() -> None:
    index = index_of()
    checkpoint = ready(index, "a", logits=5)
    index.drop(checkpoint)
    assert (checkpoint.slot, checkpoint.kv, checkpoint.logits, len(index)) == (None, None, None, 0)
    assert index.slots.used == index.kv_rows.used == 0
    with pytest.raises(CheckpointRuntimeError, match="from absent to absent"):
        index.drop(checkpoint)


def test_no_drop_under_a_lease() -> None:
    index = index_of()
    checkpoint = ready(index, "a", leases=1)
    with pytest.raises(CheckpointRuntimeError, match="dropped under a lease"):
        index.drop(checkpoint)
    assert checkpoint.status is READY
    assert index.slots.owner(0) == b"a"


def test_least_recently_used_goes_first() -> None:
    index = index_of(slots=3)
    kept = {name: ready(index, name) for name in "abc"}
    index.touch(kept["a"])
    for new, expected in (("d", "acd"), ("e", "ade"), ("f", "def")):
        ready(index, new)
        index.enforce_limits()
        assert names(index) == set(expected)
    assert index.evictions == 3
    assert index.why_absent(b"b") == "evicted"
    assert index.why_absent(b"z") == "never seen"


def test_ephemeral_ones_go_first_and_always() -> None:
    index = index_of(slots=2)
    for name in "abc":
        ready(index, name, retention=EPHEMERAL if name == "c" else DECLARED)
    index.enforce_limits()
    assert names(index) == {"a", "b"}
    ready(index, "d", retention=EPHEMERAL)
    index.limits.slots = None
    index.enforce_limits()
    assert names(index) == {"a", "b"}
    assert index.evictions == 0
    assert index.why_absent(b"c") == "never seen"


def test_demand_lease_and_production_protect() -> None:
    index = index_of(slots=0)
    ready(index, "a", retention=EPHEMERAL)
    leased = ready(index, "b", leases=1)
    index.want(b"a")
    assert index.reserve(b"c", [1], 1) is not None
    index.enforce_limits()
    assert names(index) == {"a", "b", "c"}
    index.unwant(b"a")
    index.unlease(leased)
    index.enforce_limits()
    assert names(index) == {"c"}


def test_looking_at_demand_leaves_no_trace() -> None:
    index = index_of(slots=0)
    ready(index, "a")
    index.enforce_limits()
    assert not index.demand


def test_bytes_count_a_shared_prefix_once() -> None:
    index = index_of()
    root = ready(index, "r", length=50)
    assert index.bytes_used() == 150
    ready(index, "a", length=7, parent=root.kv)
    ready(index, "b", length=3, parent=root.kv, logits=1000)
    assert index.bytes_used() == 300 + 60 + 1000
    index.drop(root)
    assert index.bytes_used() == 200 + 60 + 1000, "the prefix's keys and values live on for its children"
    index.reserve(b"c", [1], 1)
    assert index.bytes_used() == 200 + 60 + 1000


@pytest.mark.parametrize(("allowed", "expected"), [(312, "abc"), (311, "bc"), (208, "bc"), (207, "c"), (103, "")])
def test_byte_limit(allowed: int, expected: str) -> None:
    index = index_of(max_bytes=allowed)
    for name in "abc":
        ready(index, name)
    index.enforce_limits()
    assert names(index) == set(expected)


def test_clear_takes_all_but_leased_and_unready_ones() -> None:
    index = index_of()
    for name in "abc":
        ready(index, name, leases=int(name == "b"), retention=EPHEMERAL if name == "c" else DECLARED)
    index.want(b"a")
    index.reserve(b"d", [1], 1)
    index.clear()
    assert names(index) == {"b", "d"}
    assert index.why_absent(b"a") == "evicted"


def test_a_new_checkpoint_forgets_that_it_was_evicted() -> None:
    index = index_of(slots=0)
    ready(index, "a")
    index.enforce_limits()
    assert index.why_absent(b"a") == "evicted"
    ready(index, "a", retention=EPHEMERAL)
    index.enforce_limits()
    assert index.why_absent(b"a") == "never seen"


@pytest.mark.parametrize(
    "kinds", [(EPHEMERAL, SOFT, DECLARED), (DECLARED, SOFT, EPHEMERAL), (SOFT, DECLARED, DECLARED)]
)
def test_declared_ones_outlive_soft_ones(kinds: tuple[Retention, ...]) -> None:
    index = index_of(slots=1)
    for name, kind in zip("abc", kinds, strict=True):
        ready(index, name, retention=kind)
    index.enforce_limits()
    last = max(range(3), key=lambda i: (kinds[i], i))
    assert names(index) == {"abc"[last]}


def test_more_tokens_a_byte_stay_longer() -> None:
    """A long prefix saves more than a short one for about the same bytes; in time an unused one goes all the same."""
    index = index_of(slots=2)
    ready(index, "l", length=100)  # 100 tokens in 200 bytes
    survived = 0
    for i in range(40):
        ready(index, "abcdefghij"[i % 10] + str(i), length=4)  # 4 tokens in 104 bytes
        index.enforce_limits()
        survived += "l" in names(index)
    # The floor rises with every second one that goes: two short ones are there at any time.
    assert survived == pytest.approx(2 * (100 / 200) / (4 / 104), abs=2)


def test_a_checkpoint_that_becomes_declared_is_kept_like_one() -> None:
    index = index_of(slots=1)
    soft = ready(index, "a", retention=SOFT)
    index.want_kept(soft, DECLARED)
    index.want_kept(soft, EPHEMERAL)
    ready(index, "b", retention=SOFT)
    index.enforce_limits()
    assert names(index) == {"a"}


def test_a_pinned_one_stays_until_it_is_let_go() -> None:
    index = index_of(slots=1)
    pinned = ready(index, "a")
    index.pin(pinned)
    index.pin(pinned)
    for name in "bc":
        ready(index, name)
        index.enforce_limits()
        assert names(index) == {"a"}
    assert not index.evict_one(wanted_too=True)
    index.unpin(pinned)
    ready(index, "d")
    index.enforce_limits()
    assert names(index) == {"a"}
    index.unpin(pinned)
    ready(index, "e")
    index.enforce_limits()
    assert names(index) == {"e"}
    index.unpin(pinned)


def test_pins_never_break_the_limits() -> None:
    index = index_of(slots=2, max_bytes=310)
    first, second = ready(index, "a"), ready(index, "b", length=200)
    index.pin(first)
    with pytest.raises(CheckpointRuntimeError, match="2 pinned checkpoints would take 404 bytes; the limits are 2"):
        index.pin(second)
    index.drop(second)
    index.pin(ready(index, "c"))
    with pytest.raises(CheckpointRuntimeError, match="3 pinned checkpoints would take"):
        index.pin(ready(index, "d"))


@pytest.mark.parametrize("status", [UNREADY, ABSENT])
def test_only_a_ready_one_can_be_pinned(status: CheckpointStatus) -> None:
    index = index_of()
    checkpoint = index.reserve(b"a", [1], 1)
    assert checkpoint is not None
    if status is ABSENT:
        index.drop(checkpoint)
    with pytest.raises(CheckpointRuntimeError, match=f"this one is {status.value}"):
        index.pin(checkpoint)


def test_one_that_is_wanted_goes_only_when_nothing_else_helps() -> None:
    index = index_of()
    ready(index, "a")
    ready(index, "b", length=50)
    index.want(b"a")
    assert index.evict_one()
    assert names(index) == {"a"}
    assert not index.evict_one()
    assert index.evict_one(wanted_too=True)
    assert len(index) == 0


def test_ten_thousand_uses_leave_a_short_queue() -> None:
    index = index_of()
    kept = [ready(index, name) for name in "abc"]
    for i in range(10_000):
        index.touch(kept[i % 3])
    assert len(index._queue._heap) < 200

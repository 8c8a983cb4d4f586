"""Ends of turns that are kept, starts where only others declared a boundary, and why something was not reused."""

from __future__ import annotations

import pytest

from ckpt_hf.checkpoint import Retention
from ckpt_hf.reasons import Reason
from ckpt_hf.requests import Request, RequestStatus

from .invariants import check_idle, check_invariants
from .simulation import BYTES_OF_LOGITS, BYTES_PER_SLOT, BYTES_PER_TOKEN, Simulation

ANCHOR = list(range(1000, 1200))


def answer(sim: Simulation, request: Request, count: int, reason: str = "eos") -> None:
    """Generate ``count`` tokens (the last one is not computed) and end."""
    sim.prefill()
    for _ in range(count - 1):
        sim.decode_step([request])
    sim.cancel(request, reason)
    check_invariants(sim)


class TestTurns:
    def test_the_next_turn_starts_at_the_end_of_the_answer(self) -> None:
        sim = Simulation(1000)
        first = sim.add(ANCHOR[:100], scoped=True, keep_answer=True)
        answer(sim, first, 6)
        (kept,) = sim.index.checkpoints
        assert (len(kept.token_ids), kept.retention, sim.slots.used) == (105, Retention.SOFT, 1)
        assert sim.computed.total() == 105, "keeping the end cost a forward"
        second = sim.add([*first.token_ids, 7, 8, 9], scoped=True)
        sim.prefill()
        assert second.cached_tokens == 105
        check_invariants(sim)

    def test_a_chat_of_many_turns_computes_each_token_once(self) -> None:
        sim = Simulation(128)
        ids = [1, 2, 3]
        for turn in range(20):
            ids = [*ids, 50 + turn, *range(turn)]
            request = sim.add(ids, [3], scoped=True, keep_answer=True)
            answer(sim, request, 4)
            ids = list(request.token_ids)
        assert set(sim.computed.values()) == {1}
        check_idle(sim)

    def test_the_end_of_a_prompt_costs_no_forward(self) -> None:
        sim = Simulation(1000)
        first = sim.add(ANCHOR[:100], [100], soft=frozenset({100}), scoped=True)
        answer(sim, first, 3, "cancelled")
        assert sim.computed.total() == 102
        second = sim.add([*ANCHOR[:100], 5, 5], scoped=True)
        sim.prefill()
        assert second.cached_tokens == 100

    @pytest.mark.parametrize("reason", ["cancelled", "failed", "shutdown"])
    def test_half_an_answer_is_not_kept(self, reason: str) -> None:
        sim = Simulation(1000)
        answer(sim, sim.add(ANCHOR, scoped=True, keep_answer=True), 5, reason)
        assert len(sim.index) == sim.slots.used == 0

    def test_the_end_of_an_answer_has_no_logits(self) -> None:
        """A prompt that ends exactly there needs them: it starts at the checkpoint before, and is still served."""
        sim = Simulation(1000)
        first = sim.add(ANCHOR[:100], [60], scoped=True, keep_answer=True)
        answer(sim, first, 4)
        again = sim.add(first.token_ids[:103], scoped=True)
        declared = sim.add(first.token_ids[:103], [60, 103], scoped=True)
        sim.prefill()
        assert (again.cached_tokens, declared.cached_tokens) == (60, 60)
        check_invariants(sim)

    def test_declared_ones_outlive_ends_of_turns(self) -> None:
        limit = 3 * (BYTES_PER_SLOT + BYTES_OF_LOGITS) + 900 * BYTES_PER_TOKEN
        sim = Simulation(1000, max_bytes=limit)
        sim.add(ANCHOR[:50], [50], decode=False, scoped=True)
        sim.prefill()
        for i in range(10):
            answer(sim, sim.add([i, *ANCHOR], scoped=True, keep_answer=True), 3)
        assert sim.ready(ANCHOR[:50]) is not None
        assert 1 < len(sim.index) <= 4
        check_idle(sim)


class TestUndeclared:
    def test_starts_where_another_declared_a_boundary_24(self) -> None:
        sim = Simulation(1000)
        sim.add([*ANCHOR, *ANCHOR], [200], scoped=True)
        sim.prefill()
        second = sim.add([*ANCHOR, 1, 2, 3], scoped=True)
        sim.prefill()
        assert second.cached_tokens == 200
        check_invariants(sim)

    @pytest.mark.parametrize("changed", [{"salt": "x"}, {"identity": b"adapter"}, {"scoped": False}], ids=str)
    def test_never_in_another_scope_28(self, changed: dict[str, object]) -> None:
        sim = Simulation(1000)
        sim.add([*ANCHOR, 1], [200], scoped=True)
        sim.prefill()
        other = sim.add([*ANCHOR, 2], **{"scoped": True, **changed})
        sim.prefill()
        assert other.cached_tokens == 0

    def test_a_prompt_with_images_is_compared_by_key_alone(self) -> None:
        sim = Simulation(1000)
        sim.add([*ANCHOR, 1], [200], scoped=True)
        sim.prefill()
        other = sim.add([*ANCHOR, 2], scoped=True, media=((5, bytes(32)),))
        sim.prefill()
        assert other.cached_tokens == 0


class TestReasons:
    def reason(self, sim: Simulation, **fields: object) -> str | None:
        request = sim.add([*ANCHOR, 2], [200], scoped=True, **fields)
        sim.prefill()
        sim.finish_all()
        return request.reasons.get(200)

    def test_never_seen(self) -> None:
        assert self.reason(Simulation(1000)) == Reason.NEVER_SEEN

    def test_a_hit_has_none(self) -> None:
        sim = Simulation(1000)
        self.reason(sim)
        assert self.reason(sim) is None

    def test_evicted(self) -> None:
        sim = Simulation(1000, slots=0)
        self.reason(sim)
        assert self.reason(sim) == Reason.EVICTED

    def test_other_adapter_102(self) -> None:
        sim = Simulation(1000)
        self.reason(sim, identity=b"adapter")
        assert self.reason(sim) == Reason.OTHER_ADAPTER

    def test_another_caller_is_named_in_the_trace_alone(self) -> None:
        sim = Simulation(1000)
        self.reason(sim, salt="other")
        seen = []
        sim.scheduler.emit = seen.append
        assert self.reason(sim) == Reason.NEVER_SEEN
        assert [e.data["reason"] for e in seen if e.kind == "missed"] == ["other caller"]

    def test_unready_while_it_waits(self) -> None:
        sim = Simulation(64)
        sim.add([*ANCHOR, 1], [200], scoped=True)
        sim.prefill_step()
        waiter = sim.add([*ANCHOR, 2], [200], scoped=True)
        assert (waiter.status, waiter.reasons) == (RequestStatus.DEFERRED, {200: Reason.UNREADY})
        sim.prefill()
        assert waiter.reasons == {}

    def test_no_boundary_there_16(self) -> None:
        """The prompts share 150 tokens, but the boundary lies behind them: the reason says where one would pay."""
        sim = Simulation(1000)
        sim.add([*ANCHOR, 1], [200], scoped=True)
        sim.prefill()
        other = sim.add([*ANCHOR[:150], *[5] * 50], [180], scoped=True)
        sim.prefill()
        assert other.reasons == {180: Reason.NEVER_SEEN, 150: Reason.NO_BOUNDARY}

"""How the op tests call a backend, and the batches that they run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ckpt_ops
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.reference import causal_conv1d_prefill_reference, gdn_prefill_reference
from ckpt_ops.testing import DeltaRuleInputs, delta_rule_budget, relative_error

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Backend:
    """One implementation of the ops. ``direct``: call the Triton launchers, not the dispatcher."""

    name: str
    device: str
    direct: bool = False

    @property
    def small(self) -> bool:
        """The interpreter takes about 10 ms a program."""
        return self.direct

    @property
    def rounds_operands(self) -> bool:
        """The CPU implementation computes in fp32, the kernels round operands to the inputs' dtype."""
        return self.name != "cpu"

    def supports(self, dtype: torch.dtype) -> bool:
        """Triton's interpreter multiplies bf16 as integers; kernels have no fp64."""
        return dtype != torch.bfloat16 if self.direct else dtype != torch.float64 or self.name == "cpu"

    def table(self, segments: Sequence[Segment], num_slots: int) -> SegmentTable:
        return SegmentTable.build(segments, num_slots, self.device)

    def prefill(
        self, inputs: DeltaRuleInputs, states: Tensor, table: SegmentTable, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and pool after it; ``states`` is not changed."""
        tensors, pool = self._move(inputs), states.to(self.device, copy=True)
        if self.direct:
            from ckpt_ops import launch

            slots = (table.cu_seqlens, pool, table.sources, table.destinations)
            out = launch.two_phase_gdn_prefill(*tensors, *slots, table.parents, table.phase_offsets, scale)
        else:
            out = ckpt_ops.two_phase_gdn_prefill(*tensors, pool, table, scale=scale)
        return out, pool

    def prefill_one_phase(self, inputs: DeltaRuleInputs, states: Tensor, table: SegmentTable) -> tuple[Tensor, Tensor]:
        tensors, pool = self._move(inputs), states.to(self.device, copy=True)
        if self.direct:
            from ckpt_ops import launch

            return launch.gdn_prefill(*tensors, table.cu_seqlens, pool, table.sources, table.destinations), pool
        return ckpt_ops.gdn_prefill(*tensors, pool, table), pool

    def decode(
        self, inputs: DeltaRuleInputs, states: Tensor, slots: Tensor, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        tensors, pool, slots = self._move(inputs), states.to(self.device, copy=True), slots.to(self.device)
        if self.direct:
            from ckpt_ops import launch

            return launch.gdn_decode(*tensors, pool, slots, scale), pool
        return ckpt_ops.gdn_decode(*tensors, pool, slots, scale=scale), pool

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        table: SegmentTable,
        activation: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, weight, pool = x.to(self.device), weight.to(self.device), states.to(self.device, copy=True)
        bias = None if bias is None else bias.to(self.device)
        if self.direct:
            from ckpt_ops import launch

            slots = (table.cu_seqlens, pool, table.sources, table.destinations)
            return launch.causal_conv1d_prefill(x, weight, bias, *slots, table.parents, activation), pool
        return ckpt_ops.causal_conv1d_prefill(x, weight, bias, pool, table, activation=activation), pool  # type: ignore[arg-type]

    def conv_decode(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        slots: Tensor,
        activation: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, weight, pool = x.to(self.device), weight.to(self.device), states.to(self.device, copy=True)
        bias, slots = None if bias is None else bias.to(self.device), slots.to(self.device)
        if self.direct:
            from ckpt_ops import launch

            return launch.causal_conv1d_decode(x, weight, bias, pool, slots, activation), pool
        return ckpt_ops.causal_conv1d_decode(x, weight, bias, pool, slots, activation=activation), pool  # type: ignore[arg-type]

    def conv_gates(
        self, tokens: Sequence[Tensor | None], states: Tensor, table: SegmentTable, activation: str | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """``tokens``: x, weight, bias, a, b, a_log, dt_bias. Results and pool after it."""
        moved, pool = self._move_all(tokens), states.to(self.device, copy=True)
        if self.direct:
            from ckpt_ops import launch

            links = (table.cu_seqlens, pool, table.sources, table.destinations, table.parents)
            return launch.conv_gates_prefill(*moved, *links, activation), pool
        return ckpt_ops.conv_gates_prefill(*moved, pool, table, activation=activation), pool

    def conv_gates_decode(
        self, tokens: Sequence[Tensor | None], states: Tensor, slots: Tensor, activation: str | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        moved, pool, slots = self._move_all(tokens), states.to(self.device, copy=True), slots.to(self.device)
        if self.direct:
            from ckpt_ops import launch

            return launch.conv_gates_decode(*moved, pool, slots, activation), pool
        return ckpt_ops.conv_gates_decode(*moved, pool, slots, activation=activation), pool

    def _move_all(self, tokens: Sequence[Tensor | None]) -> tuple[Any, ...]:
        return tuple(None if x is None else _move_view(x, self.device) for x in tokens)

    def _move(self, inputs: DeltaRuleInputs) -> tuple[Tensor, ...]:
        if self.device == "cpu":
            return inputs.tensors()
        return tuple(_move_view(x, self.device) for x in inputs.tensors())

    def check(
        self, inputs: DeltaRuleInputs, states: Tensor, segments: Sequence[Segment], *, hard: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run the batch, compare outputs and written slots with fp64, and require the other slots untouched."""
        table = self.table(segments, states.shape[0])
        out, pool = self.prefill(inputs, states, table)
        host = SegmentTable.build(segments, states.shape[0], "cpu")
        expected, expected_pool = gdn_prefill_reference(*inputs.tensors(), states, host)
        dtype, rounds = inputs.v.dtype, self.rounds_operands
        state_dtype = dtype if rounds or dtype == torch.float64 else torch.float32
        budget = delta_rule_budget(dtype, states.dtype, rounds_operands=rounds, hard=hard)
        state_budget = delta_rule_budget(state_dtype, states.dtype, rounds_operands=rounds, hard=hard)
        written = [segment.destination for segment in segments if segment.destination >= 0]
        within(out, expected, budget, "outputs")
        within(pool[written], expected_pool[written], state_budget, "states")
        untouched(pool, states, written)
        return out, pool

    def check_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        segments: Sequence[Segment],
        activation: str | None,
        budget: float,
    ) -> None:
        """As :meth:`check`, for the convolution; states are exact."""
        out, pool = self.conv(x, weight, bias, states, self.table(segments, states.shape[0]), activation)
        host = SegmentTable.build(segments, states.shape[0], "cpu")
        expected, expected_pool = causal_conv1d_prefill_reference(x, weight, bias, states, host, activation=activation)
        written = [segment.destination for segment in segments if segment.destination >= 0]
        within(out, expected, budget, "outputs")
        assert torch.equal(pool[written].cpu(), expected_pool[written].to(states.dtype))
        untouched(pool, states, written)


def _move_view(x: Tensor, device: str) -> Tensor:
    """Copy to the device with the strides kept, where ``Tensor.to`` would make a dense tensor of a slice."""
    if x.is_contiguous() or device == "cpu":
        return x.to(device)
    base = x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0).to(device)
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


BACKENDS = {
    "cpu": Backend("cpu", "cpu"),
    "cuda": Backend("cuda", "cuda"),
    "interpreter": Backend("interpreter", "cpu", direct=True),
}


def within(result: Tensor, reference: Tensor, budget: float, what: str) -> None:
    """Require the relative error of ``what`` to stay within the derived budget; NaN fails."""
    error = relative_error(result, reference)
    print(f"{what}: relative error {error:.2e}, budget {budget:.2e}")
    assert error <= budget, f"{what}: relative error {error:.3e} exceeds the budget {budget:.3e}"


def untouched(pool: Tensor, before: Tensor, written: Sequence[int]) -> None:
    """Require all slots but ``written`` to be as before, NaN included."""
    rest = [slot for slot in range(before.shape[0]) if slot not in written]
    assert torch.equal(pool[rest].cpu().nan_to_num(7e4), before[rest].nan_to_num(7e4))


def used_slots(segments: Sequence[Segment]) -> set[int]:
    """The slots that a batch may read."""
    return {segment.source for segment in segments if segment.source >= 0}


def mixed_lengths(small: bool) -> list[Segment]:
    """Independent sequences round the chunk and block edges; every other one starts from a slot."""
    lengths = (0, 1, 15, 16, 17, 33, 65) if small else (0, 1, 15, 16, 63, 64, 65, 127, 128, 130)
    count = len(lengths)
    return [
        Segment(length, source=index if index % 2 else -1, destination=count + index)
        for index, length in enumerate(lengths)
    ]


def forest(small: bool) -> list[Segment]:
    """Depth 3, with ancestors of 0 and 1 tokens, leaves that keep nothing, and a slot reused in place."""
    long = 17 if small else 130
    return [
        Segment(0, source=1, destination=4),
        Segment(long, destination=5),
        Segment(16, source=1, destination=6),
        Segment(3, source=2, destination=2),
        Segment(1, parent=0, destination=7),
        Segment(20, parent=1, destination=8),
        Segment(0, parent=2, destination=9),
        Segment(2, parent=1),
        Segment(1, parent=4, destination=10),
        Segment(15, parent=6, destination=11),
        Segment(33 if small else 64, parent=5, destination=12),
        Segment(2, parent=8, destination=13),
    ]

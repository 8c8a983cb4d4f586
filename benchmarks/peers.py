"""Arms of other projects, used where they are installed: Flash Linear Attention (PyPI: flash-linear-attention).

It takes packed states only, so they are gathered from and scattered to the pool around each call.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from benchmarks.arms import Arm, InFull, OneByOne
from benchmarks.loads import Shape
from benchmarks.parts import Tokens
from benchmarks.workload import Workload
from ckpt_ops import SegmentTable


class _FlashLinearAttention(Arm):
    allowance = 2.0  # w, u, the new values and each chunk's state are rounded on their way through memory

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._indices: dict[SegmentTable, tuple[Tensor, Tensor, Tensor]] = {}

    def chunked(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        if table not in self._indices:
            self._indices[table] = (table.cu_seqlens.long(), table.sources.long(), table.destinations.long())
        cu_seqlens, sources, destinations = self._indices[table]
        q, k, v, g, beta = (x.unsqueeze(0) for x in tokens)
        states = self.part.pools[0]
        out, final = chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=states.index_select(0, sources),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        states.index_copy_(0, destinations, final)
        result: Tensor = out[0]
        return result


class FlaInFull(_FlashLinearAttention, InFull):
    """:class:`InFull` with FLA's chunked kernels."""

    name, title = "fla_in_full", "FLA: nothing shared, one packed call"


class FlaOneByOne(_FlashLinearAttention, OneByOne):
    """:class:`OneByOne` with FLA's chunked kernels."""

    name, title = "fla_one_by_one", "FLA: one call a request"


class FlaTwoCalls(_FlashLinearAttention):
    """Producers in one packed call, then Consumers in another."""

    name, title = "fla_two_calls", "FLA: two packed calls"

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self.phases = (
            (work.rows(0, work.prefix_tokens), work.table(work.producer_segments())),
            (work.rows(work.prefix_tokens, work.bounds[-1]), work.table(work.consumer_segments())),
        )

    def run(self) -> list[Tensor]:
        return [self.chunked(tokens, table) for tokens, table in self.phases]


def peer_arms(shape: Shape, device: torch.device) -> tuple[type[Arm], ...]:
    """Peers that can run ``shape`` here: on a GPU, where the package is installed, for the bare delta rule."""
    if device.type != "cuda" or shape.conv_width or importlib.util.find_spec("fla") is None:
        return ()
    return FlaInFull, FlaOneByOne, FlaTwoCalls

"""FlashInfer 0.7 on Hopper (PyPI: flashinfer-python, CuTe DSL), in the calls that it is best in.

It reads and writes a pool by index, ``[num_slots, H_v, D_v, D_k]`` fp32 with the value dimension first, so its arms
have a pool of their own, turned over before and after the check and never within a timed call. The decay is the linear
alpha, made beforehand; the norms of q and k are its own and timed. With context parallelism a sequence is split over
programs, but states are taken from and left in packed rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.arms import Arm, InFull, TwoCalls
from benchmarks.parts import Tokens
from benchmarks.workload import Workload
from ckpt_ops import SegmentTable


class _FlashInfer(Arm):
    project = "FlashInfer"
    allowance = 2.0  # q and k are rounded behind their norms, and the triangular solve has fp16 operands

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        # Not from the package's top, which imports everything it has.
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        self._call: Callable[..., tuple[Tensor, Tensor]] = chunk_gated_delta_rule
        self._alphas: dict[SegmentTable, Tensor] = {}
        self.pool = self.part.pools[0].mT.contiguous()

    def load_states(self) -> None:
        self.pool.copy_(self.part.pools[0].mT)

    def store_states(self) -> None:
        self.part.pools[0].copy_(self.pool.mT)

    def chunked(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        return self.by_index(tokens, table)

    def by_index(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        """One call without context parallelism; reads may repeat, writes are private."""
        return self._prefill(
            tokens,
            table,
            use_cp=False,
            initial_state=self.pool,
            output_state=self.pool,
            state_indices=table.sources,
            output_state_indices=table.destinations,
        )

    def _prefill(self, tokens: Tokens, table: SegmentTable, **states: Any) -> Tensor:
        q, k, v, g, beta = tokens
        if table not in self._alphas:
            self._alphas[table] = g.exp()
        out, _ = self._call(
            q,
            k,
            v,
            self._alphas[table],
            beta,
            output_final_state=True,
            cu_seqlens=table.cu_seqlens,
            use_qk_l2norm_in_kernel=True,
            backend="flashinfer",
            **states,
        )
        return out


class FlashInferInFull(_FlashInfer, InFull):
    """:class:`InFull` with FlashInfer's kernel."""

    name, title = "flashinfer_in_full", "FlashInfer: nothing shared, one call"


class FlashInferTwoCalls(_FlashInfer, TwoCalls):
    """:class:`TwoCalls` with FlashInfer's kernel; nothing is gathered or copied."""

    name, title = "flashinfer_two_calls", "FlashInfer: two calls, pool by index"


class FlashInferSplit(FlashInferTwoCalls):
    """The Producers with context parallelism, into their slots, which are consecutive; the Consumers by index."""

    name, title = "flashinfer_split", "FlashInfer: two calls, prefixes split"

    def run(self) -> list[Tensor]:
        (tokens, table), consumers = self.phases
        producers = self.work.load.producers
        first = self._prefill(
            tokens,
            table,
            use_cp=True,
            max_seqlen=max(producers),
            initial_state=self.pool.index_select(0, table.sources),
            output_state=self.pool[1 : 1 + len(producers)],
        )
        return [first, self.by_index(*consumers)]

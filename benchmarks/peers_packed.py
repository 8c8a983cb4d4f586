"""Peers that take packed states: FLA 0.6 (PyPI: flash-linear-attention) and FlashQLA 0.1 (PyPI: flash-qla, TileLang).

Their states are gathered from and scattered to the pool around each call. FLA hands its work to FlashQLA by itself
where that is installed; here each is measured as itself, so that is switched off.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.arms import Arm, InFull, OneByOne, TwoCalls
from benchmarks.parts import Tokens
from benchmarks.workload import Workload
from ckpt_ops import SegmentTable


class _PackedStates(Arm):
    allowance = 2.0  # w, u, the new values and each chunk's state are rounded on their way through memory

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._call = self.load()
        self._indices: dict[SegmentTable, tuple[Tensor, Tensor, Tensor]] = {}

    @abstractmethod
    def load(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The peer's ``chunk_gated_delta_rule``; the two have one signature."""

    def chunked(self, tokens: Tokens, table: SegmentTable) -> Tensor:
        if table not in self._indices:
            self._indices[table] = (table.cu_seqlens.long(), table.sources.long(), table.destinations.long())
        cu_seqlens, sources, destinations = self._indices[table]
        q, k, v, g, beta = (x.unsqueeze(0) for x in tokens)
        states = self.part.pools[0]
        out, final = self._call(
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
        states.index_copy_(0, destinations, final.to(torch.float32))
        return out[0]


class _Fla(_PackedStates):
    project = "FLA"

    def load(self) -> Callable[..., tuple[Tensor, Tensor]]:
        os.environ.update(FLA_FLASH_QLA="0", FLA_TILELANG="0")  # read when FLA first looks for backends
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        call: Callable[..., tuple[Tensor, Tensor]] = chunk_gated_delta_rule
        return call


class FlaInFull(_Fla, InFull):
    """:class:`InFull` with FLA's chunked kernels."""

    name, title = "fla_in_full", "FLA: nothing shared, one packed call"


class FlaOneByOne(_Fla, OneByOne):
    """:class:`OneByOne` with FLA's chunked kernels."""

    name, title = "fla_one_by_one", "FLA: one call a request"


class FlaTwoCalls(_Fla, TwoCalls):
    """:class:`TwoCalls` with FLA's chunked kernels."""

    name, title = "fla_two_calls", "FLA: two packed calls"


class _FlashQla(_PackedStates):
    project = "FlashQLA"

    def load(self) -> Callable[..., tuple[Tensor, Tensor]]:
        from flash_qla import chunk_gated_delta_rule

        call: Callable[..., tuple[Tensor, Tensor]] = chunk_gated_delta_rule
        return call


class FlashQlaInFull(_FlashQla, InFull):
    """:class:`InFull` with FlashQLA's kernels, which split long sequences by their own rule."""

    name, title = "flash_qla_in_full", "FlashQLA: nothing shared, one packed call"


class FlashQlaTwoCalls(_FlashQla, TwoCalls):
    """:class:`TwoCalls` with FlashQLA's kernels. No call a request: its capture remembers four tables at most."""

    name, title = "flash_qla_two_calls", "FlashQLA: two packed calls"

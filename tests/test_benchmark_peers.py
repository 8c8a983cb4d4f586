"""The benchmark's peers and single ops: states end up where they belong, and a wrong result is not timed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import ckpt_ops
from benchmarks.arms import ARMS, Arm
from benchmarks.loads import SHARD, WHOLE_LAYER, Load, on_cpu
from benchmarks.measure import Timer
from benchmarks.peers import PEERS, peer_arms
from benchmarks.pieces import BUILDERS, OURS, YARDSTICKS, measure_pieces
from benchmarks.workload import Workload
from ckpt_ops import SegmentTable

SHAPES = [on_cpu(WHOLE_LAYER), on_cpu(SHARD)]
RAGGED = Load((70, 5, 1), (3, 64, 0, 1, 9))


def _packed_stand_in(
    *tokens: torch.Tensor, initial_state: torch.Tensor, cu_seqlens: torch.Tensor, **options: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As FLA and FlashQLA: one batch of sequences, packed states in and out."""
    assert options == {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    states, slots = initial_state.clone(), range(len(initial_state))
    table = SegmentTable.from_cu_seqlens(cu_seqlens.tolist(), len(slots), "cpu", sources=slots, destinations=slots)
    out = ckpt_ops.gdn_prefill(*(x[0] for x in tokens), states, table)
    return out[None], states


def _flashinfer_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    output_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_cp: bool,
    state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As FlashInfer: linear decay, value dimension first, a pool by index or, split, packed rows."""
    assert options == {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "backend": "flashinfer"}
    count = len(cu_seqlens) - 1
    if use_cp:
        assert state_indices is None and output_state_indices is None
        assert len(initial_state) == len(output_state) == count
        assert max_seqlen == int(cu_seqlens.diff().max())
        state_indices = output_state_indices = torch.arange(count)
    assert state_indices is not None and output_state_indices is not None
    states = torch.cat([initial_state[state_indices.long()].mT, torch.zeros_like(initial_state[:1]).mT]).contiguous()
    table = SegmentTable.from_cu_seqlens(
        cu_seqlens.tolist(), count + 1, "cpu", sources=range(count), destinations=range(count)
    )
    out = ckpt_ops.gdn_prefill(q, k, v, alpha.log(), beta, states, table)
    output_state[output_state_indices.long()] = states[:count].mT
    return out, output_state


MODULES = {
    "fla": ("fla.ops.gated_delta_rule", _packed_stand_in),
    "flash_qla": ("flash_qla", _packed_stand_in),
    "flashinfer": ("flashinfer.gdn_prefill", _flashinfer_stand_in),
}


@pytest.mark.parametrize(
    ("package", "kind"),
    [pytest.param(package, kind, id=kind.name) for package, kinds in PEERS.items() for kind in kinds],
)
def test_peer_arm_moves_states_to_where_they_belong(
    package: str, kind: type[Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the peer's function, which needs a GPU."""
    path, stand_in = MODULES[package]
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[path], "chunk_gated_delta_rule", stand_in, raising=False)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    monkeypatch.setenv("FLA_TILELANG", "1")
    work = Workload(replace(SHAPES[0], dim=32), RAGGED, "cpu")
    arm = kind(work)
    assert arm.check() <= work.part.budget
    arm.check()  # again: nothing of the first run is left for it
    assert os.environ["FLA_FLASH_QLA"] == ("0" if package == "fla" else "1"), "FLA must not run FlashQLA's kernels"


def test_peers_run_on_gpus_only() -> None:
    assert peer_arms(SHAPES[0], torch.device("cpu")) == ()
    names = [arm.name for arms in (ARMS, *PEERS.values()) for arm in arms]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", BUILDERS)
def test_piece_agrees_with_fp64(name: str) -> None:
    piece = BUILDERS[name](replace(SHAPES[0], dim=16), torch.device("cpu"), 1)
    assert tuple(piece.yardsticks) == YARDSTICKS[name]
    piece.check()
    for yardstick in piece.yardsticks.values():
        yardstick()
    piece.check()  # again: running the others changes nothing of ours


def test_a_wrong_piece_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_ops.gdn_decode", lambda q, k, v, *rest: torch.zeros_like(v))
    failures: list[str] = []
    timer = Timer(torch.device("cpu"), warmups=1, repetitions=1)
    rows = [row for rows in measure_pieces(replace(SHAPES[1], dim=16), timer, 1, failures) for row in rows]
    assert [failure.split(":")[0] for failure in failures] == [f"decode, batch {n}" for n in (1, 16, 64, 256)]
    assert {row.load for row in rows if row.arm == OURS}.isdisjoint(failure.split(":")[0] for failure in failures)
    assert all((row.error is None) == (row.arm != OURS) for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kinds in PEERS.values() for kind in kinds], ids=lambda kind: kind.name)
def test_installed_peer_agrees_with_fp64(kind: type[Arm]) -> None:
    if kind not in peer_arms(WHOLE_LAYER, torch.device("cuda")):
        pytest.skip("not installed, or not for this GPU")
    kind(Workload(WHOLE_LAYER, Load.of(2, 130, 3, 65), "cuda")).check()

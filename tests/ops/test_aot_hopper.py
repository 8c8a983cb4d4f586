"""The kernels for sm_90 compile ahead of time, as launched there, and their shared memory fits.

Their module is imported here and by a launch on such a device, and nowhere else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from aot import Recorder, check_all_fit

from ckpt_ops import Segment, SegmentTable
from ckpt_ops.blocks import choose_config
from ckpt_ops.testing import make_delta_rule_inputs, make_pool

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Every D_k with every dtype of tokens; the states' dtype and the value heads of a key head take turns.
CHAINS = [
    (64, BF16, F32, 1),
    (64, F16, BF16, 4),
    (128, F16, F32, 2),
    (128, BF16, F32, 2),
    (128, F16, BF16, 1),
    (128, BF16, BF16, 4),
]
INTRAS = [(64, BF16, 1), (64, F16, 2), (64, F16, 4), (128, F16, 1), (128, BF16, 2), (128, BF16, 4)]
Launch = Callable[..., dict[str, Recorder]]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Runs the host code for sm_90 on a Producer and ``consumers`` of one token; returns what it launched."""
    from ckpt_ops import launch_hopper

    found = {name: Recorder(getattr(launch_hopper, name).kernel) for name in ("_INTRA", "_CHAIN")}
    for name, recorder in found.items():
        monkeypatch.setattr(launch_hopper, name, recorder)
    monkeypatch.setattr(launch_hopper, "_multiprocessors", lambda _: 132)

    def run(dim_k: int, dtype: torch.dtype, group: int, states: torch.dtype, consumers: int) -> dict[str, Recorder]:
        segments = [Segment(70, destination=0)] + [Segment(1, parent=0)] * consumers
        table = SegmentTable.build(segments, 1, "cpu")
        inputs = make_delta_rule_inputs(table.num_tokens, 2, 2 * group, dim_k, 128, dtype=dtype)
        assert choose_config(90, dim_k, 128, dtype).hopper
        pool = make_pool(1, 2 * group, dim_k, 128, dtype=states)
        links = (table.cu_seqlens, pool, table.sources, table.destinations, table.phase_offsets)
        launch_hopper.prefill(*inputs.tensors(), *links, 0.1, torch.empty_like(inputs.v))
        return found

    return run


def gluon() -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


@pytest.mark.parametrize(("dim_k", "dtype", "states", "group"), CHAINS, ids=str)
def test_chain(launch: Launch, dim_k: int, dtype: torch.dtype, states: torch.dtype, group: int) -> None:
    check_all_fit(launch(dim_k, dtype, group, states, consumers=2)["_CHAIN"], 90, gluon())


def test_each_item_of_a_walk_has_a_length_of_its_own(launch: Launch) -> None:
    """Triton 3.6 let the walk take the first item's, which equal lengths do not show, and others wait for ever."""
    (binary,) = launch(128, BF16, 2, F32, consumers=2)["_CHAIN"].compile(90, gluon())
    bounds = list(inner_bounds(str(binary.asm["ttgir"])))
    assert len(bounds) == 3, "the chunks of an item are walked by three groups of warps"
    assert all(bounds)


def inner_bounds(ir: str) -> Iterator[bool]:
    """For each loop within a loop: whether all that its bound is made of is carried or computed by the outer loop."""
    loops: list[int] = []
    inside: set[str] = set()
    operands: dict[str, list[str]] = {}
    depth = 0
    for line in ir.splitlines():
        loop = re.search(r"scf\.for %\w+ = \S+ to (%\w+)", line)
        if loop and loops:
            bound = operands[loop[1]]
            while len(bound) == 1:  # passed through an assembly instruction
                bound = operands[bound[0]]
            yield inside.issuperset(bound)
        defined = re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line)
        if defined:
            operands[defined[1]] = re.findall(r"%\w+", defined[2].split(" loc(")[0])
            inside |= {defined[1]} if loops else set()
        if loop:
            loops.append(depth)
            inside |= set(re.findall(r"(%\w+) = ", line.partition("iter_args(")[2]))
        depth += line.count("{") - line.count("}")
        if loops and depth <= loops[-1]:
            loops.pop()
            inside = inside if loops else set()


@pytest.mark.parametrize("consumers", [2, 140], ids=["in one launch", "in two"])
@pytest.mark.parametrize(("dim_k", "dtype", "group"), INTRAS, ids=str)
def test_intra(launch: Launch, dim_k: int, dtype: torch.dtype, group: int, consumers: int) -> None:
    """With many Consumers the later phases' part is launched beside the first walk, in a form of its own."""
    recorder = launch(dim_k, dtype, group, F32, consumers)["_INTRA"]
    assert len(recorder.launches) == (1 if consumers == 2 else 2)
    check_all_fit(recorder, 90, gluon())


def test_a_grid_holds_all_chunks_or_the_other_kernels_run() -> None:
    """The second dimension of a grid ends at 65535."""
    from ckpt_ops import launch_hopper

    assert launch_hopper.fits(65535 * 64 - 64, 1)
    assert not launch_hopper.fits(65535 * 64, 1)
    assert not launch_hopper.fits(0, 65536)


PROGRAM = """
import sys, torch, ckpt_ops
from ckpt_ops import Segment, SegmentTable, blocks, launch
q, gate = torch.randn(3, 1, 64, dtype=torch.float16), torch.zeros(3, 1)
table = SegmentTable.build([Segment(3, destination=0)], 1, "cpu")
pool = torch.zeros(1, 1, 64, 64)
ckpt_ops.two_phase_gdn_prefill(q, q, q, gate, gate, pool, table)
links = (table.cu_seqlens, pool, table.sources, table.destinations)
launch.gdn_prefill(q, q, q, gate, gate, *links)
print(*(name for name in sys.modules if "hopper" in name or "gluon" in name))
"""


def test_they_are_not_imported_elsewhere() -> None:
    """Neither on a CPU nor by the plain kernels' launchers, here interpreted, though sm_90 would run such heads."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = [name for name in run.stdout.split() if name.startswith("ckpt_ops")]
    assert not loaded

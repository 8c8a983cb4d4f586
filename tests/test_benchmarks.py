"""The benchmark's arms compute what they claim: each agrees with fp64, and a wrong one is noticed. Nothing is timed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.arms import ARMS, Arm, InFull, TokenSerialBatched, TwoPhase
from benchmarks.loads import SHARD, WHOLE_LAYER, Load, Shape, on_cpu
from benchmarks.measure import GRAPH_CALLS, Timer, capture
from benchmarks.token_serial import RawGates
from benchmarks.workload import START_SLOT, Workload
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.testing import make_delta_rule_inputs, make_pool, relative_error

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [on_cpu(WHOLE_LAYER), on_cpu(SHARD)]
RAGGED = Load((70, 5, 1), (3, 64, 0, 1, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=["delta_rule", "layer"])
@pytest.mark.parametrize("kind", ARMS, ids=[arm.name for arm in ARMS])
def test_arm_agrees_with_fp64(kind: type[Arm], shape: Shape, dtype: torch.dtype) -> None:
    work = Workload(replace(shape, dtype=dtype, dim=32), RAGGED, "cpu")
    start = [pool[START_SLOT].clone() for pool in work.part.pools]
    arm = kind(work)
    assert arm.check() <= work.part.budget
    arm.check()  # again: a run leaves nothing behind that the next one would read
    assert all(torch.equal(pool[START_SLOT], before) for pool, before in zip(work.part.pools, start, strict=True))


def test_a_wrong_arm_is_noticed() -> None:
    class Forgetful(TwoPhase):
        """Consumers start from the Producers' own start, not from the checkpoint."""

        def __init__(self, work: Workload) -> None:
            super().__init__(work)
            consumers = [replace(segment, source=START_SLOT) for segment in work.consumer_segments()]
            work.forest, self.right = work.table([*work.producer_segments(), *consumers]), work.forest

        def check(self) -> float:
            self.work.poison()
            outputs = self.run()
            self.work.forest = self.right
            return self.work.check(self.packed(outputs), checkpoints=True)

    work = Workload(replace(SHAPES[0], dim=32), Load.of(1, 20, 2, 5), "cpu")
    with pytest.raises(RuntimeError, match=r"relative error .* of the outputs against fp64"):
        Forgetful(work).check()


def test_arms_compute_as_many_tokens_as_they_say() -> None:
    work = Workload(replace(SHAPES[0], dim=32), Load.of(1, 40, 4, 8), "cpu")
    assert InFull(work).table.num_tokens == 4 * 48
    assert work.forest.num_tokens == 40 + 4 * 8
    assert [table.num_tokens for _, table in TokenSerialBatched(work).phases] == [40, 32]


def test_token_serial_refuses_a_table_with_parents() -> None:
    work = Workload(replace(SHAPES[0], dim=32), Load.of(1, 4, 1, 2), "cpu")
    with pytest.raises(ValueError, match="no parents"):
        work.part.token_serial(work.part.tokens, work.forest)


def _token_serial_cases(device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Kernel and host walk on the same ragged sequences, with given and with raw gates: pairs of output and pool."""
    from benchmarks import token_serial as module

    lengths = (0, 1, 5, 9)
    segments = [Segment(n, source=i - 1, destination=4 + i) for i, n in enumerate(lengths)]
    inputs = make_delta_rule_inputs(sum(lengths), 2, 4, 24, 40)
    raw = RawGates(torch.randn(4, generator=torch.Generator().manual_seed(3)), torch.linspace(-2, 25, 4))
    pairs = []
    for gates in (None, raw):
        results = []
        for target in (device, torch.device("cpu")):
            pool = make_pool(8, 4, 24, 40).to(target)
            table = SegmentTable.build(segments, 8, target)
            moved = None if gates is None else RawGates(gates.a_log.to(target), gates.dt_bias.to(target))
            walk = module._launch if target is device else module._walk_on_host
            results.append((walk(*inputs.to(target).tensors(), pool, table, moved), pool))
        pairs.extend(zip(*results, strict=True))
    return pairs


def test_token_serial_kernel_in_the_interpreter() -> None:
    program = (
        "import sys, torch; sys.path.insert(0, 'tests')\n"
        "from test_benchmarks import _token_serial_cases, relative_error\n"
        "for kernel, host in _token_serial_cases(torch.device('cpu')): print(relative_error(kernel, host))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 4
    assert max(errors) < 1e-5


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("raw_gates", [False, True])
def test_token_serial_kernel_compiles(capability: int, raw_gates: bool) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.token_serial_kernel import token_serial_kernel

    sizes = {"HK": 16, "HV": 32, "DK": 128, "DV": 128, "BK": 128, "BV": 32, "NORM_EPS": 1e-6, "RAW_GATES": raw_gates}
    pointers = {"a_log": "*fp32", "dt_bias": "*fp32", "states": "*fp32", "scale": "fp32"}
    pointers |= dict.fromkeys(("cu_seqlens", "sources", "destinations"), "*i32")
    signature = {
        name: "constexpr" if name in sizes else pointers.get(name, "i32" if name.endswith("_stride") else "*bf16")
        for name in token_serial_kernel.arg_names
    }
    source = ASTSource(fn=token_serial_kernel, signature=signature, constexprs=sizes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 99 * 1024


@pytest.mark.gpu
def test_a_graph_of_many_calls_runs_each_of_them() -> None:
    counter = torch.zeros((), device="cuda")
    replay = capture(lambda: counter.add_(1), warmups=2, calls=GRAPH_CALLS)
    counter.zero_()
    replay()
    assert counter.item() == GRAPH_CALLS
    assert len(Timer(torch.device("cuda")).modes()) == 3


@pytest.mark.gpu
def test_token_serial_kernel_on_the_gpu() -> None:
    for kernel, host in _token_serial_cases(torch.device("cuda")):
        assert relative_error(kernel, host) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [WHOLE_LAYER, SHARD], ids=["delta_rule", "layer"])
@pytest.mark.parametrize("kind", ARMS, ids=[arm.name for arm in ARMS])
def test_captured_arm_agrees_with_fp64(kind: type[Arm], shape: Shape) -> None:
    work = Workload(shape, Load.of(2, 130, 3, 65), "cuda")
    arm = kind(work)
    arm.check()
    outputs: list[torch.Tensor] = []

    def run() -> None:
        outputs[:] = arm.run()

    replay = capture(run)
    work.poison()
    replay()
    work.check(arm.packed(outputs), checkpoints=arm.keeps_checkpoints)


def test_loads_without_a_consumer_for_each_producer_are_refused() -> None:
    with pytest.raises(ValueError, match="2 Producers and 1 Consumers"):
        Load((3, 4), (5,))
    assert Load.of(1, 512, 16, 64).name == "1 x 512 + 16 x 64"
    assert RAGGED.name == "(70, 5, 1) + (3, 64, 0, 1, 9)"

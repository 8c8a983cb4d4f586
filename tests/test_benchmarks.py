"""The benchmark's arms compute what they claim: each agrees with fp64, and a wrong one is noticed. Nothing is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.arms import ARMS, Arm, InFull, TokenSerialBatched, TwoPhase
from benchmarks.loads import SHARD, WHOLE_LAYER, Load, Shape, on_cpu
from benchmarks.measure import Timer, Timing, capture
from benchmarks.report import main, parse_arguments, plan
from benchmarks.tables import format_table, make_rows
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


def test_the_published_loads_and_shapes() -> None:
    (whole, loads), (shard, shard_loads) = plan(torch.device("cuda"), long=False)
    assert (whole.heads_k, whole.heads_v, whole.dim, whole.dtype) == (16, 32, 128, torch.bfloat16)
    assert (shard.heads_k, shard.heads_v, shard.conv_width) == (4, 8, 4)
    assert [(load.producers, load.consumers) for load in loads] == [((512,), (64,) * n) for n in (1, 2, 4, 8, 16)]
    assert shard_loads == loads
    options = parse_arguments([])
    assert (options.warmups, options.repetitions, options.seed) == (5, 20, 1)


def test_summary_and_ratio() -> None:
    timing = Timing.of([1e-6 * n for n in range(1, 12)])
    assert (timing.median, timing.p10, timing.p90) == pytest.approx((6.0, 2.0, 10.0))
    single = Timing.of([2e-6])
    rows = make_rows("load", {("slow", "eager"): (timing, 0.0), ("fast", "eager"): (single, 1e-3)}, "slow")
    assert [row.ratio for row in rows] == pytest.approx([1.0, 3.0])
    assert make_rows("load", {("fast", "graph"): (single, 0.0)}, "slow")[0].ratio is None
    lines = format_table("title", rows, {"slow": "the slow one", "fast": "the fast one"}).splitlines()
    assert lines[0] == "title"
    assert "the fast one" in lines[4]
    assert "3.00" in lines[4]


def test_timer_counts_calls() -> None:
    calls: list[int] = []
    Timer(torch.device("cpu"), warmups=2, repetitions=3).eager(lambda: calls.append(1))
    assert len(calls) == 5


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = [(replace(shape, dim=16), (Load.of(1, 9, 2, 3),)) for shape in SHAPES]
    monkeypatch.setattr("benchmarks.report.plan", lambda device, long: tiny)
    target = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--no-model", "--warmups", "1", "--repetitions", "2", "--json", str(target)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    figures = json.loads(target.read_text())
    assert torch.__version__ in printed
    assert all(arm.title in printed for arm in ARMS)
    assert [len(table["rows"]) for table in figures["tables"]] == [len(ARMS)] * 2
    assert {"device", "torch", "triton", "commit"} <= set(figures["environment"])


def test_report_names_a_wrong_arm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.report.plan", lambda device, long: [(SHAPES[0], (Load.of(1, 9, 2, 3),))])
    monkeypatch.setattr(TwoPhase, "run", lambda self: [torch.zeros_like(self.part.tokens[2])])
    arguments = ["--device", "cpu", "--no-model", "--warmups", "1", "--repetitions", "1", "--arms", "two_phase"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "not timed: two-phase, one packed call: 1 x 9 + 2 x 3: relative error" in printed.err
    assert TwoPhase.title not in printed.out


@pytest.fixture
def model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model in the embedded one's architecture, which needs no accuracy to be compared with itself."""
    from ckpt_hf.demo import tokenizer
    from ckpt_hf.demo.architecture import make_config, make_model

    torch.manual_seed(0)
    text_tokenizer = tokenizer.build()
    make_model(make_config(text_tokenizer)).save_pretrained(tmp_path)
    text_tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("benchmarks.embedded.MODEL_DIRECTORY", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("model_directory")
def test_embedded_arms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import embedded

    timer = Timer(torch.device("cpu"), warmups=1, repetitions=1)
    rows, failures = embedded.measure_embedded(timer, seed=1, pages=2, offers=2)
    assert [row.arm for row in rows] == list(embedded.TITLES)
    assert not failures
    monkeypatch.setattr(embedded.Catalog, "generate", lambda self, batches: [torch.rand(2, 4)])
    assert len(embedded.measure_embedded(timer, seed=1, pages=1, offers=2)[1]) == 3

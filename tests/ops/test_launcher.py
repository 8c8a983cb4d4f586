"""Launching without asking Triton again: when that is allowed, what it keys on, and that ``warmup`` leaves no rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aot import Recorder, record
from test_aot import LAUNCHERS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_ops
from ckpt_ops import Segment, SegmentTable, launch, precompile
from ckpt_ops import launcher as launcher_module
from ckpt_ops.blocks import Config, choose_config, launch_key
from ckpt_ops.launcher import Launcher
from ckpt_ops.testing import make_delta_rule_inputs, make_pool

GRID = (2, 3, 1)
GPU = torch.device("cuda", 0)
OPS = sorted(name for name in ckpt_ops.__all__ if name.endswith(("_prefill", "_decode")))


class Compiled:
    """A compiled form: keeps its launches, and whether they went the way that tells profilers."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.told: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: self.told.append((grid, given))

    def run(self, *given: Any) -> None:
        self.launched.append(given)


class Kernel:
    """A kernel that keeps how often it was asked to compile, and its compiled forms."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile_and_launch(*arguments: Any, **options: Any) -> Compiled:
            self.asked.append((grid, arguments, options))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compile_and_launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, and a driver whose streams are 100 and on."""
    current = [0]

    class Driver:
        @staticmethod
        def get_current_stream(index: int) -> int:
            return 100 + index

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(launcher_module, "driver", SimpleNamespace(active=Driver))
    return current


def test_asks_once_for_each_key_and_device(device: list[int]) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    for key in ("a", "a", "b", "a"):
        launcher(GRID, key, (1, 2), {"num_warps": 4})
    assert len(kernel.asked) == 2
    launch = (*GRID, 100, "function", "metadata", None, None, None, 1, 2)
    assert kernel.compiled[0].launched == [launch, launch]
    assert not kernel.compiled[1].launched
    device[0] = 1
    launcher(GRID, "a", (1, 2), {"num_warps": 4})
    assert len(kernel.asked) == 3


def test_tensors_enter_as_pointers_and_nothing_else_changes(device: list[int]) -> None:
    kernel, x = Kernel(), torch.ones(3)
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher(GRID, "key", (x, None, 0.5), {})
    assert kernel.asked[0][1][0] is x
    assert kernel.compiled[0].launched[0][9:] == (x.data_ptr(), None, 0.5)


def test_pointers_that_the_caller_has_are_not_asked_for_again(device: list[int]) -> None:
    kernel, x, y = Kernel(), torch.ones(3), torch.ones(3)
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher(GRID, "key", (x, y, 7), {}, (11, 12))
    assert kernel.asked[0][1] == (x, y, 7)
    assert kernel.compiled[0].launched[0][9:] == (11, 12, 7)


def test_profilers_are_told(device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    launcher(GRID, "key", (7,), {})
    monkeypatch.setattr(launcher_module, "_is_watched", lambda: True)
    launcher(GRID, "key", (7,), {})
    assert kernel.compiled[0].told == [(GRID, (7,))]
    assert not kernel.compiled[0].launched


def test_without_a_key_triton_is_asked_and_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise AssertionError("no device on this path")

    monkeypatch.setattr(torch.cuda, "current_device", fail)
    kernel = Kernel()
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher(GRID, None, (1,), {})
    assert len(kernel.asked) == 2


@dataclass
class OnDevice:
    """As much of a tensor on a GPU as a key depends on."""

    pointer: int = 512
    row: int = 64
    dtype: torch.dtype = torch.float16
    device: torch.device = GPU

    def data_ptr(self) -> int:
        return self.pointer

    def stride(self, dim: int) -> int:
        assert dim == 0
        return self.row


def key_of(row: Any, block: Any = None, other: Any = None, constants: tuple[int, ...] = (1,)) -> Any:
    return launch_key((row,), (block,), (other,), constants)


def test_a_key_holds_all_that_kernels_are_specialised_for() -> None:
    good = OnDevice()
    known = key_of(good, good, good)
    assert known is not None
    assert known == key_of(OnDevice(1024, 128), replace(good, row=3), replace(good, pointer=2, row=3))
    assert known != key_of(good, None, good)
    assert known != key_of(good, good, None)
    assert known != key_of(replace(good, dtype=torch.float32), good, good)
    assert known != key_of(good, replace(good, dtype=torch.float32), good)
    assert known != key_of(good, good, replace(good, dtype=torch.float32))
    assert known != key_of(good, good, good, (2,))


@pytest.mark.parametrize("changes", [{"pointer": 520}, {"row": 40}, {"row": 2**31}, {"device": torch.device("cpu")}])
def test_a_broken_promise_has_no_key(changes: dict[str, Any]) -> None:
    assert key_of(replace(OnDevice(), **changes)) is None


def test_a_misaligned_pool_has_no_key() -> None:
    assert key_of(OnDevice(), OnDevice(pointer=8)) is None
    assert key_of(OnDevice(), None, OnDevice(pointer=8)) is not None


def test_warmup_does_nothing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "run_all", lambda *_, **__: pytest.fail("ran on a CPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ckpt_ops.warmup(2, 4, 64, 64, torch.bfloat16)
    ckpt_ops.warmup(2, 4, 64, 64, torch.bfloat16, device="cpu")


class OpNames(TorchDispatchMode):
    """Names of this package's ops that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "ckpt_ops":
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def test_warmup_runs_every_op() -> None:
    with OpNames() as names:
        precompile.run_all(1, 2, 16, 32, torch.bfloat16, torch.float32, 4, torch.device("cpu"), crowd=3)
    assert sorted(names.found) == OPS


def _direct(name: str) -> Callable[..., Any]:
    """The public function of that name, on the kernels' launcher: a table or slots come last."""

    def call(*arguments: Any, activation: str | None = None) -> Any:
        *tensors, pool, table = arguments
        end = () if "gdn" in name else (activation,)
        if isinstance(table, Tensor):
            return getattr(launch, name)(*tensors, pool, table, *end)
        links = (table.cu_seqlens, pool, table.sources, table.destinations)
        parents = () if name == "gdn_prefill" else (table.parents,)
        phases = (table.phase_offsets,) if name == "two_phase_gdn_prefill" else ()
        return getattr(launch, name)(*tensors, *links, *parents, *phases, *end)

    return call


@pytest.mark.parametrize("hopper", [False, True])
def test_warmup_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch, hopper: bool) -> None:
    """All forms that a server's steps launch, of few and of many segments, are among those that warmup launched."""
    recorders = list(record(monkeypatch, LAUNCHERS).values())
    if hopper:
        from ckpt_ops import launch_hopper

        for name in ("_INTRA", "_CHAIN"):
            recorders.append(Recorder(getattr(launch_hopper, name).kernel))
            monkeypatch.setattr(launch_hopper, name, recorders[-1])
        monkeypatch.setattr(launch_hopper, "_multiprocessors", lambda _: 8)

    def config(_: torch.device, *shape: Any) -> Config:
        return replace(choose_config(90, *shape), hopper=hopper)

    monkeypatch.setattr(launch, "config_for", config)
    for name in OPS:
        monkeypatch.setattr(precompile, name, _direct(name))
    precompile.run_all(2, 4, 64, 128, torch.bfloat16, torch.float32, 4, torch.device("cpu"), crowd=9)
    known = [set(recorder.forms()) for recorder in recorders]
    for lengths, rows in (((3,), 1), ((200, 64, 1), 3), ((7,) * 30, 30)):
        serve(lengths, rows)
    for recorder, forms in zip(recorders, known, strict=True):
        assert set(recorder.forms()) <= forms
        assert forms or hopper


def serve(lengths: tuple[int, ...], rows: int) -> None:
    """A step of one Producer and Consumers of these lengths, and a decode step."""
    segments = [Segment(70, destination=0)] + [Segment(length, parent=0) for length in lengths]
    table, channels = SegmentTable.build(segments, rows, "cpu"), 2 * 2 * 64 + 4 * 128
    inputs = make_delta_rule_inputs(table.num_tokens, 2, 4, 64, 128, dtype=torch.bfloat16)
    mixed = torch.cat([part.flatten(1) for part in (inputs.q, inputs.k, inputs.v)], 1)
    gates = make_pool(table.num_tokens, 4, dtype=torch.bfloat16), inputs.beta.bfloat16()
    recurrent, histories = make_pool(rows, 4, 64, 128), make_pool(rows, channels, 3, dtype=torch.bfloat16)
    conv = make_pool(channels, 4, dtype=torch.bfloat16), None
    slots = torch.arange(rows, dtype=torch.int32)

    def run(conv_name: str, gdn_name: str, count: int, end: Any) -> None:
        tokens, *logits = (part[:count] for part in (mixed, *gates))
        _, g, beta = _direct(conv_name)(
            tokens, *conv, *logits, make_pool(4), make_pool(4), histories, end, activation="silu"
        )
        q, k, v = tokens.split([128, 128, 512], 1)
        parts = q.unflatten(1, (2, 64)), k.unflatten(1, (2, 64)), v.unflatten(1, (4, 128))
        _direct(gdn_name)(*parts, g, beta, recurrent, end)

    run("conv_gates_prefill", "two_phase_gdn_prefill", table.num_tokens, table)
    run("conv_gates_decode", "gdn_decode", rows, slots)


@pytest.mark.gpu
def test_nothing_compiles_after_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    ckpt_ops.warmup(2, 4, 64, 128, torch.bfloat16, device="cuda")
    compiled: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **details: compiled.append(details))
    for length, count in ((1, 1), (77, 3), (64, 40), (5, 300)):
        segments = [Segment(length, destination=0)] + [Segment(length, parent=0)] * count
        table = SegmentTable.build(segments, 1, "cuda")
        inputs = make_delta_rule_inputs(table.num_tokens, 2, 4, 64, 128, dtype=torch.bfloat16).to("cuda")
        pool = torch.zeros(1, 4, 64, 128, device="cuda")
        ckpt_ops.two_phase_gdn_prefill(*inputs.tensors()[:4], inputs.beta.bfloat16(), pool, table)
    assert not compiled

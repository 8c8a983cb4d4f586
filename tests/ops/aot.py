"""Compiles kernels ahead of time, exactly as the launchers would have, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckpt_ops.launcher import Launcher

# Shared memory that one block may have, in bytes.
LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Form:
    """What the compiled form of a launch depends on; two launches of one form share it."""

    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass
class Recorder:
    """Stands for a kernel, or for the launcher of one: keeps the arguments of launches instead of launching."""

    kernel: Any
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert len(grid) == 3
        return lambda *args, **options: self.launches.append((args, options))

    def __call__(
        self,
        grid: tuple[int, int, int],
        key: object,
        args: tuple[Any, ...],
        options: dict[str, Any],
        pointers: tuple[int, ...] = (),
    ) -> None:
        assert key is not None
        tensors = [value.data_ptr() for value in args if isinstance(value, torch.Tensor)]
        assert not pointers or list(pointers) == tensors, "pointers are those of all tensors, which come first"
        self[grid](*args, **options)

    def forms(self) -> dict[Form, int]:
        """Forms of the launches so far, each with its number of launches."""
        found: dict[Form, int] = {}
        for args, options in self.launches:
            assert len(args) == len(self.kernel.params), "every argument is positional, as compiled kernels take them"
            form = self._form(args, options)
            found[form] = found.get(form, 0) + 1
        return found

    def _form(self, args: tuple[Any, ...], options: dict[str, Any]) -> Form:
        signature, constants, divisible = [], [], []
        for index, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=True)):
            free = parameter.do_not_specialize
            if parameter.is_constexpr or value is None:
                kind = "constexpr"
                constants.append((index, value))
            elif isinstance(value, torch.Tensor):
                kind = POINTERS[value.dtype]
                divisible += [] if free or value.data_ptr() % 16 else [index]
            elif isinstance(value, float):
                kind = "fp32"
            else:
                kind = "i32"
                assert free or value % 16 == 0, f"{parameter.name} = {value} would get a compiled form of its own"
                divisible += [] if free else [index]
            signature.append((parameter.name, kind))
        return Form(tuple(signature), tuple(constants), tuple(divisible), tuple(sorted(options.items())))

    def compile(self, capability: int, source: type[ASTSource] = ASTSource) -> Iterator[Any]:
        """Compile each form of the launches with the specialisation that a real launch would have."""
        target = GPUTarget("cuda", capability, 32)
        for form in self.forms():
            constants = {(index,): value for index, value in form.constants}
            attributes = {(index,): [["tt.divisibility", 16]] for index in form.divisible}
            kernel = source(self.kernel, dict(form.signature), constants, attributes)
            yield triton.compile(kernel, target=target, options=dict(form.options))


def record(monkeypatch: pytest.MonkeyPatch, launchers: dict[str, Launcher]) -> dict[str, Recorder]:
    """Put a recorder in the place of each launcher's kernel."""
    found = {name: Recorder(launcher.kernel) for name, launcher in launchers.items()}
    for name, launcher in launchers.items():
        monkeypatch.setattr(launcher, "kernel", found[name])
    return found


def check_all_fit(recorder: Recorder, capability: int, source: type[ASTSource] = ASTSource) -> None:
    """Compile all recorded launches and require their shared memory to fit."""
    compiled = list(recorder.compile(capability, source))
    assert compiled
    for binary in compiled:
        assert binary.asm["cubin"]
        shared = binary.metadata.shared
        assert shared <= LIMITS[capability], f"{recorder.kernel.__name__}: {shared} bytes on sm_{capability}"

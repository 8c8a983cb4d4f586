"""Every kernel compiles ahead of time for each architecture, as launched there, and its shared memory fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ckpt_ops import Segment, SegmentTable, launch, launch_attention, launch_conv
from ckpt_ops.blocks import Config, choose_config
from ckpt_ops.testing import make_delta_rule_inputs, make_pool

# Shared memory that one block may have, in bytes.
LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DELTA_RULE = ("intra_kernel", "chain_kernel", "gdn_decode_kernel")
CONVOLUTION = ("conv_prefill_kernel", "conv_decode_kernel")
ATTENTION = ("attention_split_kernel", "attention_combine_kernel")
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Each class of block sizes, a head dimension that is no power of two, and both half types.
SHAPES = [
    (torch.bfloat16, 128, 128),
    (torch.bfloat16, 96, 40),
    (torch.bfloat16, 256, 256),
    (torch.float16, 64, 64),
    (torch.float32, 64, 64),
    (torch.float32, 256, 256),
]


@dataclass
class Recorder:
    """Stands for a kernel: keeps the arguments of its launch instead of launching."""

    kernel: Any
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((args, kwargs))

    def compile(self, capability: int) -> Iterator[Any]:
        """Compile each recorded launch with the specialisation that a real one would have."""
        for args, kwargs in self.launches:
            values = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            options = {name: values.pop(name) for name in ("num_warps", "num_stages") if name in values}
            signature, constants, attributes = {}, {}, {}
            for index, parameter in enumerate(self.kernel.params):
                value = values[parameter.name]
                if parameter.is_constexpr or value is None:
                    signature[parameter.name], constants[(index,)] = "constexpr", value
                elif isinstance(value, float):
                    signature[parameter.name] = "fp32"
                else:
                    tensor = isinstance(value, torch.Tensor)
                    signature[parameter.name] = POINTERS[value.dtype] if tensor else "i32"
                    if tensor or (not parameter.do_not_specialize and value % 16 == 0):
                        attributes[(index,)] = [["tt.divisibility", 16]]
            source = ASTSource(self.kernel, signature, constants, attributes)
            yield triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    found = {}
    for module, names in ((launch, DELTA_RULE), (launch_conv, CONVOLUTION), (launch_attention, ATTENTION)):
        for name in names:
            found[name] = Recorder(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    return found


@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize(("dtype", "dim_k", "dim_v"), SHAPES, ids=str)
def test_delta_rule_kernels(
    monkeypatch: pytest.MonkeyPatch,
    recorders: dict[str, Recorder],
    dtype: torch.dtype,
    dim_k: int,
    dim_v: int,
    capability: int,
) -> None:
    def config(_: torch.device, *shape: Any) -> Config:
        return choose_config(capability, *shape)

    monkeypatch.setattr(launch, "config_for", config)
    table = SegmentTable.build([Segment(64, destination=0), Segment(64, parent=0, destination=1)], 2, "cpu")
    inputs = make_delta_rule_inputs(128, 2, 4, dim_k, dim_v, dtype=dtype)
    states = make_pool(2, 4, dim_k, dim_v)
    links = (table.cu_seqlens, states, table.sources, table.destinations)
    launch.two_phase_gdn_prefill(*inputs.tensors(), *links, table.parents, table.phase_offsets)
    launch.gdn_decode(*inputs.rows(0, 2).tensors(), states, table.sources)
    assert len(recorders["chain_kernel"].launches) == 2
    for name in DELTA_RULE:
        compiled = list(recorders[name].compile(capability))
        assert compiled
        for binary in compiled:
            assert binary.metadata.shared <= LIMITS[capability], f"{name}: {binary.metadata.shared} bytes"


@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_convolution_kernels(recorders: dict[str, Recorder], dtype: torch.dtype, capability: int) -> None:
    table = SegmentTable.build([Segment(64, destination=0), Segment(64, parent=0, destination=1)], 2, "cpu")
    x, weight, bias = (make_pool(*shape, dtype=dtype) for shape in ((128, 256), (256, 4), (256,)))
    states = make_pool(2, 256, 3, dtype=dtype)
    links = (table.cu_seqlens, states, table.sources, table.destinations, table.parents)
    launch.causal_conv1d_prefill(x, weight, None, *links, "silu")
    launch.causal_conv1d_decode(x[:2], weight, bias, states, table.sources, "silu")
    for name in CONVOLUTION:
        compiled = list(recorders[name].compile(capability))
        assert compiled
        for binary in compiled:
            assert binary.metadata.shared <= LIMITS[capability], f"{name}: {binary.metadata.shared} bytes"


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "capability"),
    [
        *((dtype, 16, 4, 256, capability) for dtype in (torch.bfloat16, torch.float32) for capability in LIMITS),
        (torch.float16, 6, 2, 40, 90),
    ],
    ids=str,
)
def test_attention_kernels(
    recorders: dict[str, Recorder], dtype: torch.dtype, heads: int, kv_heads: int, dim: int, capability: int
) -> None:
    query, keys, values = (make_pool(*shape, dtype=dtype) for shape in ((2, heads, dim), *[(64, kv_heads, dim)] * 2))
    table, at = torch.zeros((3, 256), dtype=torch.int32), torch.ones(2, dtype=torch.int64)
    launch_attention.decode_attention(query, keys, values, table, at, at, dim**-0.5)
    for name in ATTENTION:
        compiled = list(recorders[name].compile(capability))
        assert compiled
        for binary in compiled:
            assert binary.metadata.shared <= LIMITS[capability], f"{name}: {binary.metadata.shared} bytes"

"""The ops as torch sees them: opcheck, compile without breaks or recompiles, export, strides of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpt_ops
from ckpt_ops import Segment, SegmentTable
from ckpt_ops.testing import make_delta_rule_inputs, make_pool

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
HEADS_K, HEADS_V, DIM, CHANNELS, SLOTS = 1, 2, 16, 64, 18


def step(device: str, producer: int = 20, suffixes: tuple[int, ...] = (5, 3, 4), deep: bool = False) -> SegmentTable:
    segments = [Segment(producer, destination=0), Segment(producer, destination=1)]
    segments += [Segment(length, parent=0, destination=2 + i) for i, length in enumerate(suffixes)]
    if deep:
        segments.append(Segment(2, parent=2))
    return SegmentTable.build(segments, SLOTS, device)


def samples(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments of each registered op."""
    table = step(device)
    packed = make_delta_rule_inputs(table.num_tokens, HEADS_K, HEADS_V, DIM, DIM).to(device).tensors()
    rows = make_delta_rule_inputs(3, HEADS_K, HEADS_V, DIM, DIM).to(device).tensors()
    states, slots = make_pool(SLOTS, HEADS_V, DIM, DIM), torch.tensor([3, -1, 0], dtype=torch.int32, device=device)
    x, weight, bias = make_pool(table.num_tokens, CHANNELS), make_pool(CHANNELS, 4), make_pool(CHANNELS)
    pools = states.to(device), make_pool(SLOTS, CHANNELS, 3).to(device)
    conv = (weight.to(device), bias.to(device))
    links = (table.sources, table.destinations)
    a, b = make_pool(table.num_tokens, 3).to(device), make_pool(table.num_tokens, 3, dtype=torch.float16).to(device)
    rates = make_pool(3).to(device), make_pool(3).to(device)
    return {
        "gdn_prefill": (*packed, table.cu_seqlens, pools[0], *links),
        "two_phase_gdn_prefill": (*packed, table.cu_seqlens, pools[0], *links, table.parents, table.phase_offsets, 0.5),
        "causal_conv1d_prefill": (x.to(device), *conv, table.cu_seqlens, pools[1], *links, table.parents, "silu"),
        "gdn_decode": (*rows, pools[0], slots, None),
        "causal_conv1d_decode": (x[:3].to(device), *conv, pools[1], slots),
        "conv_gates_prefill": (
            *(x.to(device), *conv, a, b, *rates),
            *(table.cu_seqlens, pools[1], *links, table.parents, "silu"),
        ),
        "conv_gates_decode": (x[:3].to(device), *conv, a[:3], b[:3], *rates, pools[1], slots),
    }


@DEVICES
@pytest.mark.parametrize("name", list(samples("cpu")))
def test_opcheck(name: str, device: str) -> None:
    torch.library.opcheck(getattr(torch.ops.ckpt_ops, name).default, samples(device)[name])


@pytest.mark.parametrize("name", list(samples("cpu")))
def test_tags_and_declared_mutation(name: str) -> None:
    op = getattr(torch.ops.ckpt_ops, name).default
    assert {torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag} <= set(op.tags)
    written = [argument.name for argument in op._schema.arguments if argument.alias_info is not None]
    assert written == ["states"]


class Layer(nn.Module):
    """All ops, as a model's layer calls them: slices of one projection, pools as buffers. ``fused``: gates are computed
    beside the convolution, from what are gates otherwise."""

    recurrent: Tensor
    conv: Tensor

    def __init__(self, device: str, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.rates = nn.Parameter(make_pool(HEADS_V).to(device))
        self.weight = nn.Parameter(make_pool(CHANNELS, 4).to(device))
        self.register_buffer("recurrent", make_pool(SLOTS, HEADS_V, DIM, DIM).to(device))
        self.register_buffer("conv", make_pool(SLOTS, CHANNELS, 3).to(device))

    def heads(self, mixed: Tensor) -> list[Tensor]:
        q, k, v = mixed.split([HEADS_K * DIM, HEADS_K * DIM, HEADS_V * DIM], -1)
        return [part.view(part.shape[0], -1, DIM) for part in (q, k, v)]

    def forward(
        self, x: Tensor, g: Tensor, beta: Tensor, table: SegmentTable, decode: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        token, token_g, token_beta, slots = decode
        conv = (self.weight, None)
        if self.fused:
            rates = (self.rates, self.rates)
            mixed, g, beta = ckpt_ops.conv_gates_prefill(x, *conv, g, beta, *rates, self.conv, table, activation="silu")
            token, token_g, token_beta = ckpt_ops.conv_gates_decode(
                token, *conv, token_g, token_beta, *rates, self.conv, slots, activation="silu"
            )
        else:
            mixed = ckpt_ops.causal_conv1d_prefill(x, *conv, self.conv, table, activation="silu")
            token = ckpt_ops.causal_conv1d_decode(token, *conv, self.conv, slots, activation="silu")
        out = ckpt_ops.two_phase_gdn_prefill(*self.heads(mixed * 1.5), g, beta, self.recurrent, table)
        last = ckpt_ops.gdn_decode(*self.heads(token), token_g, token_beta, self.recurrent, slots)
        return out + 1, last


def layer_arguments(table: SegmentTable, device: str, rows: int = 7) -> tuple[Any, ...]:
    tokens = table.num_tokens
    x, gates = make_pool(tokens, CHANNELS, seed=7), make_delta_rule_inputs(tokens, HEADS_K, HEADS_V, DIM, DIM)
    token, token_gates = make_pool(rows, CHANNELS, seed=8), make_delta_rule_inputs(rows, HEADS_K, HEADS_V, DIM, DIM)
    slots = torch.arange(rows, dtype=torch.int32) + 9
    decode = (token, token_gates.g, token_gates.beta, slots)
    return x.to(device), gates.g.to(device), gates.beta.to(device), table, tuple(part.to(device) for part in decode)


@DEVICES
@pytest.mark.parametrize("fused", [False, True])
def test_compile_fullgraph_without_recompiles(fused: bool, device: str) -> None:
    """Steps of other token counts, Consumers and phases: equal to eager, and only the forest's depth recompiles."""
    torch._dynamo.reset()
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compilations.append(len(inputs))
        return torch._inductor.compile(graph, inputs) if device == "cuda" else graph.forward

    eager, compiled_layer = Layer(device, fused), Layer(device, fused)
    compiled = torch.compile(compiled_layer, fullgraph=True, dynamic=True, backend=backend)
    tables = [
        step(device),
        step(device, 40, (1, 2, 3)),
        step(device, 7, (64, 3, 9, 2)),
        step(device, 9, ()),
        step(device, 2, (2, 2)),
    ]
    with torch.no_grad():
        for index, table in enumerate(tables):
            arguments = layer_arguments(table, device, rows=7 + index % 2)
            for result, expected in zip(compiled(*arguments), eager(*arguments), strict=True):
                torch.testing.assert_close(result, expected)
            torch.testing.assert_close(compiled_layer.recurrent, eager.recurrent)
            torch.testing.assert_close(compiled_layer.conv, eager.conv)
        assert len(compilations) == 1
        arguments = layer_arguments(step(device, deep=True), device)
        torch.testing.assert_close(compiled(*arguments), eager(*arguments))
        assert len(compilations) == 2
    torch._dynamo.reset()


def test_a_scale_that_changes_is_compiled_for_all_values() -> None:
    inputs, pool = make_delta_rule_inputs(5, HEADS_K, HEADS_V, DIM, DIM), make_pool(1, HEADS_V, DIM, DIM)
    table = SegmentTable.build([Segment(5)], 1, "cpu")

    def run(scale: float) -> Tensor:
        return ckpt_ops.two_phase_gdn_prefill(*inputs.tensors(), pool, table, scale=scale)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for scale in (0.25, 0.5, -1.0):
        assert torch.equal(compiled(scale), run(scale))


@DEVICES
def test_inductor_keeps_the_mutation(device: str) -> None:
    """A state written by an op whose output nobody reads is still written."""

    def run(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        ckpt_ops.causal_conv1d_decode(x * 2, weight, None, pool, slots)
        return x + 1

    x, weight = make_pool(3, 8).to(device), make_pool(8, 4).to(device)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    pool, expected = make_pool(4, 8, 3).to(device), make_pool(4, 8, 3).to(device)
    torch._dynamo.reset()
    torch.compile(run, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")(x, weight, pool, slots)
    run(x, weight, expected, slots)
    assert torch.equal(pool, expected)
    assert not torch.equal(pool, make_pool(4, 8, 3).to(device))


class Exported(nn.Module):
    """The ops with plain tensors, since a table is no input that ``torch.export`` knows."""

    def forward(self, packed: list[Tensor], links: list[Tensor], pool: Tensor, rows: list[Tensor]) -> list[Tensor]:
        cu_seqlens, sources, destinations, parents = links
        count = sources.shape[0]
        out = torch.ops.ckpt_ops.two_phase_gdn_prefill(
            *packed, cu_seqlens, pool, sources, destinations, parents, [0, count, count]
        )
        slots = destinations[: rows[0].shape[0]]
        return [out, torch.ops.ckpt_ops.gdn_decode(*rows, pool, slots)]


@DEVICES
def test_export(device: str) -> None:
    tokens, count, rows = torch.export.Dim("tokens"), torch.export.Dim("count", min=3), 2

    def arguments(lengths: list[int]) -> tuple[Any, ...]:
        segments = [Segment(length, destination=i) for i, length in enumerate(lengths)]
        table = SegmentTable.build(segments, SLOTS, device)
        packed = make_delta_rule_inputs(table.num_tokens, HEADS_K, HEADS_V, DIM, DIM).to(device)
        links = [table.cu_seqlens, table.sources, table.destinations, table.parents]
        step_rows = make_delta_rule_inputs(rows, HEADS_K, HEADS_V, DIM, DIM).to(device)
        links = [link.clone() for link in links]
        pool = make_pool(SLOTS, HEADS_V, DIM, DIM).to(device)
        return list(packed.tensors()), links, pool, list(step_rows.tensors())

    shapes = ([{0: tokens}] * 5, [{0: count + 1}, {0: count}, {0: count}, {0: count}], None, [None] * 5)
    program = torch.export.export(Exported(), arguments([5, 20, 3]), dynamic_shapes=shapes)
    for lengths in ([5, 20, 3], [70, 1, 2, 3, 4]):
        given, expected = arguments(lengths), arguments(lengths)
        torch.testing.assert_close(program.module()(*given), Exported()(*expected))
        assert torch.equal(given[2], expected[2])


@DEVICES
def test_outputs_are_contiguous_for_any_input_strides(device: str) -> None:
    table = step(device)
    inputs = make_delta_rule_inputs(table.num_tokens, HEADS_K, HEADS_V, DIM, DIM).to(device)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs.tensors()]
    out = ckpt_ops.two_phase_gdn_prefill(*turned, make_pool(SLOTS, HEADS_V, DIM, DIM).to(device), table)
    assert out.is_contiguous()
    x = make_pool(CHANNELS, table.num_tokens).to(device).t()
    conv_pool = make_pool(SLOTS, CHANNELS, 3).to(device)
    assert ckpt_ops.causal_conv1d_prefill(x, make_pool(CHANNELS, 4).to(device), None, conv_pool, table).is_contiguous()

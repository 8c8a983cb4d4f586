"""Decode attention through a table of rows against a plain softmax in fp64."""

from __future__ import annotations

import os

import pytest
import torch
from ops_harness import Backend
from torch import Tensor

from ckpt_ops.attention import decode_attention

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# One row; the edges of a block of 16 and of 64; one past what 16 shares of one block hold; many shares, the last empty.
LENGTHS = (1, 15, 16, 17, 64, 65, 257) if INTERPRETING else (1, 15, 16, 17, 64, 65, 257, 1025, 2000)


def attend(backend: Backend, *args: Tensor, scale: float) -> Tensor:
    if INTERPRETING:
        from ckpt_ops import launch_attention

        return launch_attention.decode_attention(*args, scale)
    device = "cuda" if backend.name == "cuda" else "cpu"
    return decode_attention(*(x.to(device) for x in args), scale).cpu()


def make_rows(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """A table whose lines share their first rows and scatter the rest, and the number of pool rows."""
    generator = torch.Generator().manual_seed(1)
    rows = 2 * max(lengths) + len(lengths)
    table = torch.full((len(lengths) + 1, 2 * max(lengths)), rows + 10**6, dtype=torch.int32)
    for line in range(len(lengths)):
        table[line + 1, : max(lengths)] = torch.randperm(rows, generator=generator)[: max(lengths)]
        table[line + 1, : max(lengths) // 2] = torch.arange(max(lengths) // 2)
    return table, torch.tensor(lengths) - 1, rows


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (8, 1, 40), (3, 3, 64), (16, 4, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_softmax_over_each_path(
    backend: Backend, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    if not backend.supports(dtype):
        pytest.skip(f"{backend.name} does not multiply {dtype}")
    lengths = LENGTHS if dim < 256 else LENGTHS[-2:]
    generator = torch.Generator().manual_seed(2)
    table, positions, pool = make_rows(lengths)
    lines = torch.arange(len(lengths)) + 1
    # A view with the row stride of a projection, as the model hands it over.
    query = torch.randn((len(lengths), 2 * heads, dim), generator=generator).to(dtype)[:, ::2]
    keys, values = (torch.randn((pool, kv_heads, dim), generator=generator).to(dtype) for _ in range(2))
    actual = attend(backend, query, keys, values, table, lines, positions, scale=dim**-0.5)
    assert actual.dtype == dtype
    for row, length in enumerate(lengths):
        seen = table[row + 1, :length].long()
        k, v = (x[seen].double().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        weights = (torch.einsum("hd,nhd->hn", query[row].double(), k) * dim**-0.5).softmax(-1)
        expected = torch.einsum("hn,nhd->hd", weights, v)
        error = ((actual[row].double() - expected).norm() / expected.norm()).item()
        # The weights are rounded to the values' dtype once, the result once more.
        assert error <= (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), (length, error)


def test_a_row_does_not_depend_on_its_neighbours(backend: Backend) -> None:
    table, positions, pool = make_rows(LENGTHS)
    lines = torch.arange(len(LENGTHS)) + 1
    generator = torch.Generator().manual_seed(3)
    query = torch.randn((len(LENGTHS), 4, 16), generator=generator)
    keys, values = (torch.randn((pool, 2, 16), generator=generator) for _ in range(2))
    together = attend(backend, query, keys, values, table, lines, positions, scale=0.25)
    for row in range(len(LENGTHS)):
        at = slice(row, row + 1)
        alone = attend(backend, query[at], keys, values, table, lines[at], positions[at], scale=0.25)
        if backend.name == "cpu":  # PyTorch's attention pads rows to the longest, which may change the order of sums
            assert (together[at] - alone).abs().max() <= 1e-6
        else:
            assert torch.equal(together[at], alone)


def test_no_rows(backend: Backend) -> None:
    table, _, pool = make_rows((3,))
    query, keys = torch.empty((0, 4, 16)), torch.randn(pool, 2, 16)
    empty = torch.empty(0, dtype=torch.int64)
    assert attend(backend, query, keys, keys, table, empty, empty, scale=1.0).shape == (0, 4, 16)

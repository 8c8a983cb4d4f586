"""The loads: how many Producers and Consumers of which length, and the shape of the layer that runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """One Gated DeltaNet layer: heads, head dimension (``D_k = D_v``), dtype of the tokens; states are fp32.

    ``conv_width`` 0 times the delta rule alone, on given q, k, v and gates. Otherwise the timed part starts at the
    projections' output and includes the convolution with its own states, the split and the gates.
    """

    heads_k: int
    heads_v: int
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    conv_width: int = 0

    @property
    def name(self) -> str:
        """Heads and part in short: ``16/32`` or ``4/8+conv``."""
        return f"{self.heads_k}/{self.heads_v}" + ("+conv" if self.conv_width else "")

    @property
    def title(self) -> str:
        """What is timed, for the head of a table."""
        part = f"convolution of {self.conv_width}, split, gates, delta rule" if self.conv_width else "delta rule alone"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{part}: H_k {self.heads_k}, H_v {self.heads_v}, D {self.dim}, {dtype}, fp32 states"


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of each Producer and of each Consumer; Consumer ``i`` continues Producer ``i % len(producers)``."""

    producers: tuple[int, ...]
    consumers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.producers) <= len(self.consumers):
            raise ValueError(
                f"a load needs a Producer and a Consumer of each, got {len(self.producers)} Producers and "
                f"{len(self.consumers)} Consumers"
            )

    @classmethod
    def of(cls, producers: int, prefix: int, consumers: int, suffix: int) -> Load:
        """``producers`` prefixes of one length and ``consumers`` suffixes of one length."""
        return cls((prefix,) * producers, (suffix,) * consumers)

    @property
    def name(self) -> str:
        """As in the tables, such as ``1 x 512 + 16 x 64``."""
        return f"{_group(self.producers)} + {_group(self.consumers)}"

    def parent(self, consumer: int) -> int:
        """Producer that a Consumer continues."""
        return consumer % len(self.producers)


def _group(lengths: tuple[int, ...]) -> str:
    return f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "(" + ", ".join(map(str, lengths)) + ")"


WHOLE_LAYER = Shape(heads_k=16, heads_v=32)
"""All heads of Qwen3.5-9B and Qwen3.5-35B-A3B."""

QUARTER = Shape(heads_k=4, heads_v=8)
"""A quarter of them, as one of four tensor-parallel ranks holds them."""

SHARD = Shape(heads_k=4, heads_v=8, conv_width=4)
"""A quarter of the heads with the convolution: the shape and the timed part of the script that first measured two-phase
prefill (vLLM pull request 55876)."""

SHORT_LOADS = tuple(Load.of(1, 512, consumers, 64) for consumers in (1, 2, 4, 8, 16))
"""One catalog item against 1 to 16 candidates."""

LONG_LOADS = (Load.of(1, 8192, 64, 128), Load.of(8, 4096, 128, 256), Load.of(1, 32768, 16, 256))

CPU_LOADS = (Load.of(1, 128, 1, 16), Load.of(1, 128, 4, 16), Load.of(1, 128, 16, 16))
"""Small enough that all arms take about a minute on two cores."""


def on_cpu(shape: Shape) -> Shape:
    """``shape`` at a quarter of its heads, half its head dimension and in fp32."""
    heads_k = max(1, shape.heads_k // 4)
    heads_v = heads_k * (shape.heads_v // shape.heads_k)
    return replace(shape, heads_k=heads_k, heads_v=heads_v, dim=shape.dim // 2, dtype=torch.float32)

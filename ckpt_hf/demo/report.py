"""The comparison as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
import transformers
from rich.table import Table

from ckpt_hf.demo.compare import Pass


def make_table(passes: Sequence[Pass], pages: int, offers: int) -> Table:
    """One row a pass; the ratio is the first pass's time over the pass's own."""
    table = Table(title=f"{pages} catalog pages x {offers} offers; prompt tokens computed and saved")
    table.add_column("")
    for name in ("accuracy", "differing", "computed", "saved", "seconds", "ratio"):
        table.add_column(name, justify="right")
    for entry in passes:
        table.add_row(
            entry.name,
            f"{entry.accuracy:.2%}",
            f"{entry.differing:,}",
            f"{entry.computed_tokens:,}",
            f"{entry.saved_tokens:,}",
            f"{entry.seconds:.2f}",
            f"{passes[0].seconds / entry.seconds:.2f}",
        )
    return table


def make_json(passes: Sequence[Pass], pages: int, offers: int, seed: int, device: str) -> str:
    """The passes with all figures, the arguments and the versions, as one JSON object."""
    entries = [
        {**asdict(entry), "saved_tokens": entry.saved_tokens, "ratio": passes[0].seconds / entry.seconds}
        for entry in passes
    ]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    arguments = {"anchors": pages, "candidates": offers, "seed": seed, "device": device}
    return json.dumps({**arguments, "versions": versions, "passes": entries}, indent=2)

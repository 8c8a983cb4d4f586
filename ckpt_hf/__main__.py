"""``python -m ckpt_hf``: the embedded model on held-out catalog pages, with and without checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging

from ckpt_hf.demo import catalog
from ckpt_hf.demo.compare import Pass, compare
from ckpt_hf.demo.embedded import load_model
from ckpt_hf.demo.report import make_json, make_table

_PASSES = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 if all answers agree, 1 if any differs, 2 (by argparse) for wrong arguments."""
    args = _parse(arguments)
    # transformers would tell of every fallback of its own, and show a bar for loading four megabytes.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Progress goes to stderr, so that what is read from stdout is the result alone.
    passes = _compare(args, Console(stderr=True))
    if args.json:
        print(make_json(passes, args.anchors, args.candidates, args.seed, args.device))
    else:
        Console().print(make_table(passes, args.anchors, args.candidates))
    return 1 if any(entry.differing for entry in passes) else 0


def _compare(args: argparse.Namespace, console: Console) -> list[Pass]:
    model, tokenizer = load_model(args.device)
    pages = list(catalog.pages("heldout", args.seed, args.anchors, args.candidates))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("loading", total=_PASSES * len(pages))

        def progress(name: str, done: int) -> None:
            bar.update(task, description=name, advance=done)

        return compare(model, tokenizer, pages, progress)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ckpt_hf", description=__doc__)
    parser.add_argument("--anchors", type=_positive, default=100, help="catalog pages (default: %(default)s)")
    parser.add_argument("--candidates", type=_positive, default=16, help="offers a page (default: %(default)s)")
    parser.add_argument("--device", type=_device, default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which held-out pages (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # torch says the latter of a build without CUDA
        first_line = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"must name a device of this machine, got {text!r}: {first_line}") from error
    return text


if __name__ == "__main__":
    sys.exit(main())

"""Draws the README's picture of a run: ``python -m benchmarks.run_picture --output docs/run.png``.

Offers of a few catalog pages go through an engine whose steps are small enough that pages take several; what happened
is traced and drawn as ``python -m ckpt_hf.trace`` draws it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

import ckpt_hf
from ckpt_hf import trace
from ckpt_hf.demo import catalog
from ckpt_hf.demo.embedded import load_model

PAGES, OFFERS = 4, 6
STEP_TOKENS, NEW_TOKENS = 128, 12


def record(path: Path) -> None:
    """Serve all offers with the embedded model and write the trace to ``path``."""
    model, tokenizer = load_model()
    first, *pages = catalog.pages("heldout", 0, PAGES + 1, OFFERS)
    with ckpt_hf.Engine(model, tokenizer, max_batch_tokens=STEP_TOKENS) as engine:
        engine.submit(catalog.prompt(first, first.offers[0], ""), max_new_tokens=2).result()  # what loads, loads now
        prompts = [catalog.prompt(page, offer, ckpt_hf.MARKER) for page in pages for offer in page.offers]
        with ckpt_hf.write_trace(engine, path):
            for handle in [engine.submit(p, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS) for p in prompts]:
                handle.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a run and draw it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="picture: png, svg or pdf")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        record(path)
        return trace.main([str(path), "--output", str(options.output)])


if __name__ == "__main__":
    sys.exit(main())

"""``python -m ckpt_hf.trace FILE``: what happened in a run, as a picture and in words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ckpt_hf.errors import CheckpointError
from ckpt_hf.trace_events import read_trace
from ckpt_hf.trace_picture import draw
from ckpt_hf.trace_runs import read_run
from ckpt_hf.trace_text import print_summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Read a trace, print its summary and draw it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ckpt_hf.trace", description=__doc__)
    parser.add_argument("file", type=Path, help="what ckpt_hf.write_trace wrote, JSON lines")
    parser.add_argument("--output", type=Path, help="picture: png, svg or pdf; FILE with the ending .png by default")
    parser.add_argument("--no-picture", action="store_true", help="only print the summary")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        trace = read_trace(options.file)
        run = read_run(trace.events)
        print_summary(run, console, trace.lost, trace.unreadable)
        if not options.no_picture:
            output = options.output or options.file.with_suffix(".png")
            draw(run, output)
            console.print(f"drawn to {output}", highlight=False, soft_wrap=True)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The records are JSON of the right form, but not what any run can have written.
        print(f"{options.file}: records contradict each other, so the file was damaged ({error!r})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

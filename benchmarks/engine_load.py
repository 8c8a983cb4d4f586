"""Requests a second and time to first token of the engine, against what a user of transformers can do without it.

Arms, each over the same prompts, all there at once: unpatched ``generate`` with all rows in one left-padded batch; one
call a prompt; each anchor's prefix run once by hand and its cache fanned out; the engine with nothing cached before;
the engine with the prefixes cached by an earlier run. With nothing shared: the engine with a boundary in each prompt
against the engine without. Before an arm is timed, its answers are compared with those of one call a prompt, for some
of the prompts: ``equal_answers`` is the share that is equal. ``next_token_median_ms``, from one token of a prompt to
its next, is null where there is one new token.

    python -m benchmarks.engine_load --device cuda

On a GPU install flash-linear-attention first: without it the unpatched arms run transformers' slow fallback.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from transformers import DynamicCache, StoppingCriteria

import ckpt_hf
from benchmarks.model_scale import build_model

_GPU_LOADS, _CPU_LOADS = "1x2048x16x64,4x2048x16x64", "1x256x8x16,4x128x8x16"
_PARTS = ("shared", "apart")
Figures = Iterator[tuple[str, dict[str, float | None]]]


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts of ``anchors`` shared prefixes, each with ``consumers`` suffixes of one length."""

    anchors: int
    prefix: int
    consumers: int
    suffix: int

    def rows(self, vocabulary: int, shared: bool = True) -> list[list[int]]:
        """Token ids of each prompt, anchor by anchor; without ``shared`` every prefix is another one."""
        generator = torch.Generator().manual_seed(self.prefix + self.consumers)

        def ids(length: int) -> list[int]:
            return torch.randint(1, vocabulary, (length,), generator=generator).tolist()

        rows = []
        for _ in range(self.anchors):
            anchor = ids(self.prefix)
            rows += [(anchor if shared else ids(self.prefix)) + ids(self.suffix) for _ in range(self.consumers)]
        return rows


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: new tokens by prompt, seconds until all were there, until each prompt's first token, and from one token
    of a prompt to its next."""

    tokens: list[list[int]]
    seconds: float
    first: list[float]
    gaps: list[float]


class _TokenTimes(StoppingCriteria):
    """Notes when each token of a call was chosen; stops nothing. Its wait for the device adds nothing: ``generate``
    itself reads after each token whether all rows have ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate_batches(model: Any, batches: list[list[list[int]]], new_tokens: int, prefix: int | None) -> Outcome:
    """``generate`` for one batch after the other; with ``prefix`` so many tokens of each batch are run once by hand."""
    tokens: list[list[int]] = []
    first: list[float] = []
    gaps: list[float] = []
    start = time.perf_counter()
    for rows in batches:
        ids = torch.tensor(rows, device=model.device)
        note = _TokenTimes()
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        if prefix is not None:
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(input_ids=ids[:1, :prefix], cache=cache, logits_to_keep=1)
            cache.reorder_cache(cast(Any, torch.zeros(len(ids), dtype=torch.long, device=ids.device)))
            options["cache"] = cache
        out = model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[note], **options)
        tokens += out[:, ids.shape[1] :].tolist()
        first += [note.times[0] - start] * len(rows)
        gaps += [after - before for before, after in pairwise(note.times)]
    return Outcome(tokens, time.perf_counter() - start, first, gaps)


def run_engine(engine: ckpt_hf.Engine, rows: list[list[int]], boundary: int | None, new_tokens: int) -> Outcome:
    """All prompts submitted at once."""
    start = time.perf_counter()
    positions = None if boundary is None else [boundary]
    handles = [
        engine.submit(row, checkpoint_positions=positions, max_new_tokens=new_tokens, do_sample=False) for row in rows
    ]
    outputs = [handle.result() for handle in handles]
    seconds = time.perf_counter() - start
    return Outcome(
        [output.generated_tokens for output in outputs],
        seconds,
        [output.timestamps[0] - start for output in outputs],
        [after - before for output in outputs for before, after in pairwise(output.timestamps)],
    )


def measure(
    model: Any, load: Load, new_tokens: int, repetitions: int, singles: int, parts: Sequence[str] = _PARTS
) -> Iterator[dict[str, Any]]:
    """One row an arm, as soon as it is known: medians over ``repetitions`` runs, and how many answers equal one call a
    prompt's. One call a prompt runs once, for ``singles`` prompts. ``parts`` are those of ``_PARTS`` to run.
    """
    shape = f"{load.anchors}x{load.prefix}x{load.consumers}x{load.suffix}"
    if "shared" in parts:
        for arm, figures in measure_shared(model, load, new_tokens, repetitions, singles):
            yield {"load": shape, "new_tokens": new_tokens, "arm": arm, **figures}
    if "apart" in parts:
        for arm, figures in measure_apart(model, load, new_tokens, repetitions):
            yield {"load": shape, "new_tokens": new_tokens, "arm": arm, **figures}


def measure_shared(model: Any, load: Load, new_tokens: int, repetitions: int, singles: int) -> Figures:
    """Prompts that share prefixes."""
    rows = load.rows(model.config.vocab_size)
    groups = [rows[i : i + load.consumers] for i in range(0, len(rows), load.consumers)]
    single = range(0, len(rows), max(1, len(rows) // singles))
    generate_batches(model, [rows[:1]], new_tokens, None)
    one_by_one = generate_batches(model, [[rows[i]] for i in single], new_tokens, None)
    expected = dict(zip(single, one_by_one.tokens, strict=True))
    yield "unpatched, one by one", _figures([one_by_one], 1.0)
    with _engine(model, rows) as engine:
        cold = {"engine, cold": lambda: _run_cold(model, engine, rows, load.prefix, new_tokens)}
        yield from _time(cold, expected, repetitions)
        warm = {"engine, warm": lambda: run_engine(engine, rows, load.prefix, new_tokens)}
        yield from _time(warm, expected, repetitions)
    by_hand = {"prefix run once by hand": lambda: generate_batches(model, groups, new_tokens, load.prefix)}
    yield from _time(by_hand, expected, repetitions)
    batch = {"unpatched, one batch": lambda: generate_batches(model, [rows], new_tokens, None)}
    yield from _time(batch, expected, repetitions)


def measure_apart(model: Any, load: Load, new_tokens: int, repetitions: int) -> Figures:
    """Prompts that share nothing, each with a boundary all the same or without one."""
    rows = load.rows(model.config.vocab_size, shared=False)
    with _engine(model, rows) as engine:
        expected = dict(enumerate(_run_cold(model, engine, rows, None, new_tokens).tokens))
        arms: dict[str, Callable[[], Outcome]] = {
            "nothing shared, no boundaries": lambda: _run_cold(model, engine, rows, None, new_tokens),
            "nothing shared, boundaries": lambda: _run_cold(model, engine, rows, load.prefix, new_tokens),
        }
        yield from _time(arms, expected, repetitions)


def _engine(model: Any, rows: list[list[int]]) -> ckpt_hf.Engine:
    """All checkpoints fit, so that what is measured is not how fast an evicted prefix is computed again."""
    return ckpt_hf.Engine(model, cache_slots=2 * len(rows))


def _run_cold(
    model: Any, engine: ckpt_hf.Engine, rows: list[list[int]], boundary: int | None, new_tokens: int
) -> Outcome:
    ckpt_hf.clear(model)
    return run_engine(engine, rows, boundary, new_tokens)


def _time(arms: dict[str, Callable[[], Outcome]], expected: dict[int, list[int]], repetitions: int) -> Figures:
    """Figures of each arm; the arms take turns, so that what else the machine does hits them alike.

    Args:
        arms: what to run.
        expected: right answers of some prompts, by index.
        repetitions: timed runs of each arm, after one that is compared and not timed.
    """
    equal = {}
    for name, arm in arms.items():
        tokens = arm().tokens
        equal[name] = sum(tokens[i] == answer for i, answer in expected.items()) / len(expected)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in arms}
    for _ in range(repetitions):
        for name, arm in arms.items():
            outcomes[name].append(arm())
    for name in arms:
        yield name, _figures(outcomes[name], equal[name])


def _figures(outcomes: list[Outcome], equal: float) -> dict[str, float | None]:
    first = [sorted(outcome.first) for outcome in outcomes]
    gaps = [statistics.median(outcome.gaps) for outcome in outcomes if outcome.gaps]
    return {
        "requests_per_s": statistics.median(len(o.tokens) / o.seconds for o in outcomes),
        "first_token_median_ms": 1e3 * statistics.median(times[len(times) // 2] for times in first),
        "first_token_p90_ms": 1e3 * statistics.median(times[len(times) * 9 // 10] for times in first),
        "next_token_median_ms": 1e3 * statistics.median(gaps) if gaps else None,
        "equal_answers": equal,
    }


def main() -> None:
    """Print one JSON row for each load and arm."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--shape", choices=["9B", "tiny"], default=None, help="9B on a GPU and tiny elsewhere by default"
    )
    parser.add_argument("--loads", default=None, help="anchors x prefix x consumers x suffix, comma-separated")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--singles", type=int, default=8, help="how many prompts are also run one by one")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="prompts that share, or that do not")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = build_model(args.shape or ("9B" if on_gpu else "tiny"), args.device, dtype)
    print(json.dumps({"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}))
    for text in (args.loads or (_GPU_LOADS if on_gpu else _CPU_LOADS)).split(","):
        load = Load(*map(int, text.split("x")))
        for new_tokens in args.new_tokens:
            for row in measure(model, load, new_tokens, args.repetitions, args.singles, args.parts):
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()

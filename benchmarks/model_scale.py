"""``generate`` of a model in Qwen3.5-9B's shapes with random weights: one shared prefix, many ragged suffixes.

Arms, each the whole ``generate`` call: unpatched transformers with all rows in one left-padded batch; the same with a
prefix cache made and fanned out by hand (equal suffix lengths only, since transformers cannot pad behind a prefix);
the patched model with nothing cached; and the patched model with the prefix cached by an earlier call.

    python -m benchmarks.model_scale --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import ckpt_hf

SHAPES: dict[str, dict[str, Any]] = {
    "9B": {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


def build_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A random model; made on its device, so that 9 billion parameters never pass through host memory."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**SHAPES[shape], eos_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def time_ms(call: Callable[[], Any], repetitions: int, device: str) -> float:
    """Median wall time of ``call`` in milliseconds; the device is idle before and after each."""
    times = []
    for _ in range(repetitions):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def hand_made(model: Any, ids: torch.Tensor, prefix: int, new_tokens: int) -> torch.Tensor:
    """What a user can do today: run the prefix once, fan its cache out, continue."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:1, :prefix], cache=cache, logits_to_keep=1)
    cache.reorder_cache(cast(Any, torch.zeros(len(ids), dtype=torch.long, device=ids.device)))
    return model.generate(ids, cache=cache, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)


def measure(
    model: Any, prefix: int, consumers: int, suffix: int, new_tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Times of the arms for one load, and how far the answers agree."""
    generator = torch.Generator().manual_seed(prefix + consumers)
    anchor = torch.randint(1, model.config.vocab_size, (1, prefix), generator=generator).expand(consumers, -1)
    tails = torch.randint(1, model.config.vocab_size, (consumers, suffix), generator=generator)
    ids = torch.cat([anchor, tails], dim=1).to(args.device)
    positions = [[prefix]] * consumers
    options: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = {k: options[k] for k in ("max_new_tokens", "do_sample", "pad_token_id")}
    expected = model.generate(ids, **options)
    row: dict[str, Any] = {"prefix": prefix, "consumers": consumers, "suffix": suffix, "new_tokens": new_tokens}
    row["unpatched_ms"] = time_ms(lambda: model.generate(ids, **plain), args.repetitions, args.device)
    hand_made(model, ids, prefix, new_tokens)
    row["hand_made_ms"] = time_ms(lambda: hand_made(model, ids, prefix, new_tokens), args.repetitions, args.device)
    ckpt_hf.patch(model)
    try:
        actual = model.generate(ids, checkpoint_positions=positions, **options)
        error = (actual.logits[0].float() - expected.logits[0].float()).norm() / expected.logits[0].float().norm()
        row["logits_error"] = error.item()
        row["first_tokens_equal"] = int(
            (actual.sequences[:, ids.shape[1]] == expected.sequences[:, ids.shape[1]]).sum()
        )
        del actual, expected

        def cold() -> None:
            ckpt_hf.clear(model)
            model.generate(ids, checkpoint_positions=positions, **plain)

        row["cold_ms"] = time_ms(cold, args.repetitions, args.device)
        row["warm_ms"] = time_ms(
            lambda: model.generate(ids, checkpoint_positions=positions, **plain), args.repetitions, args.device
        )
    finally:
        ckpt_hf.unpatch(model)
    return row


def main() -> None:
    """Print the table, one JSON row a load."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default=None, help="9B on a GPU and tiny elsewhere by default")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--loads", default="2048x16x64,4096x64x128", help="prefix x consumers x suffix, comma-separated"
    )
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    model = build_model(
        args.shape or ("9B" if on_gpu else "tiny"), args.device, torch.bfloat16 if on_gpu else torch.float32
    )
    for load in args.loads.split(","):
        prefix, consumers, suffix = map(int, load.split("x"))
        for new_tokens in args.new_tokens:
            row = measure(model, prefix, consumers, suffix, new_tokens, args)
            row["ratio_cold"] = round(row["unpatched_ms"] / row["cold_ms"], 2)
            row["ratio_warm"] = round(row["unpatched_ms"] / row["warm_ms"], 2)
            print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()

"""Train the embedded model: ``python -m ckpt_hf.demo.train --out DIR --device cuda``.

Plain transformers training on the catalog task. A row is a page with several offers and their answers, which gives
several answers for one reading of the page; the first offer of each row is the very format of inference. The loss is
the mean cross entropy of the answers plus shares of two others that teach what an answer needs, from many more tokens:
of the offers' text, since predicting a value that the page states is looking it up; and of a judge, thrown away after
training, that reads off the hidden state at the end of each clause whether the clause differs from the page.

The same seed draws the same weights and batches on every machine; the sums of a GPU's backward pass are not ordered,
so two runs agree in accuracy, not bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from ckpt_hf.demo import catalog, tokenizer
from ckpt_hf.demo.architecture import make_config, make_model
from ckpt_hf.demo.batches import Batch, Steps, collate
from ckpt_hf.demo.training_rule import training_rule

_PAGES_AT_ONCE = 16
_HELDOUT_SEED = 1_000_003  # apart from the training stream even where the splits would not be


class Losses(NamedTuple):
    """Mean cross entropies, float32 scalars."""

    answers: Tensor
    text: Tensor
    clauses: Tensor


def losses(model: Qwen3_5ForCausalLM, judge: nn.Linear, batch: Batch) -> Losses:
    """The three losses of a batch; ``judge`` reads whether a clause differs off the hidden state at its end."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
    ids = batch.input_ids.flatten()
    answers, text = (
        cross_entropy(model.lm_head(hidden[places - 1]).float(), ids[places]) for places in (batch.answers, batch.text)
    )
    verdicts = judge(hidden[batch.clauses])[:, 0].float()
    return Losses(answers, text, binary_cross_entropy_with_logits(verdicts, batch.changed))


@torch.no_grad()
def accuracy(model: Qwen3_5ForCausalLM, text_tokenizer: PreTrainedTokenizerFast, pages: int, offers: int = 16) -> float:
    """Share of held-out prompts whose greedy answer is right, end token included; one prompt a row, as at inference."""
    correct = 0
    for first in range(0, pages, _PAGES_AT_ONCE):
        chunk = [
            catalog.make_page("heldout", _HELDOUT_SEED, index, offers)
            for index in range(first, min(pages, first + _PAGES_AT_ONCE))
        ]
        singles = [catalog.Page(page.text, page.product, (offer,)) for page in chunk for offer in page.offers]
        batch = collate(singles, text_tokenizer).to(model.device)
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        # Greedy decoding gives the answer if and only if each of its tokens is the best one after those before it.
        best = model.lm_head(hidden[batch.answers - 1]).argmax(-1)
        right = best == batch.input_ids.flatten()[batch.answers]
        correct += int(right.view(len(singles), -1).all(1).sum())  # an answer is one token and the end
    return correct / (pages * offers)


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train, write the model to ``args.out`` and return the report that is written beside it."""
    torch.manual_seed(args.seed)
    earlier = None if args.start is None else json.loads((args.start / "training.json").read_text())
    text_tokenizer = tokenizer.build()
    model = make_model(make_config(text_tokenizer, args.hidden, args.rounds))
    if args.start is not None:
        model = Qwen3_5ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    torch.nn.Module.to(model, args.device)
    started = time.perf_counter()
    with training_rule():
        _optimize(args, model, text_tokenizer)
    return _save(args, model, text_tokenizer, time.perf_counter() - started, earlier)


def _optimize(args: argparse.Namespace, model: Qwen3_5ForCausalLM, text_tokenizer: PreTrainedTokenizerFast) -> None:
    device = torch.device(args.device)
    judge = nn.Linear(model.config.hidden_size, 1).to(device)  # only for training; not saved
    optimizer = torch.optim.AdamW(_groups(model, judge), lr=args.lr, betas=(0.9, 0.98), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, args.warmup, args.steps))
    started = time.perf_counter()
    for step, batch in enumerate(_loader(args, text_tokenizer), start=1):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            parts = losses(model, judge, batch.to(device))
        optimizer.zero_grad(set_to_none=True)
        (parts.answers + args.text_weight * parts.text + args.clause_weight * parts.clauses).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % args.every == 0 or step == args.steps:
            share = accuracy(model.eval(), text_tokenizer, args.check_pages)
            model.train()
            figures = " ".join(f"{name} {value.item():.4f}" for name, value in parts._asdict().items())
            print(f"step {step} {figures} heldout {share:.4f} {time.perf_counter() - started:.1f} s", flush=True)


def _groups(model: Qwen3_5ForCausalLM, judge: nn.Linear) -> list[dict[str, object]]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": [*rest, *judge.parameters()], "weight_decay": 0.0}]


def _rate(step: int, warmup: int, steps: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))


def _loader(args: argparse.Namespace, text_tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    steps = Steps(text_tokenizer, "train", args.seed, args.steps, args.rows, args.offers)
    pinned = torch.device(args.device).type == "cuda"
    return iter(DataLoader(steps, batch_size=None, num_workers=args.workers, pin_memory=pinned))


def _save(
    args: argparse.Namespace,
    model: Qwen3_5ForCausalLM,
    text_tokenizer: PreTrainedTokenizerFast,
    seconds: float,
    earlier: dict[str, object] | None,
) -> dict[str, object]:
    """Round the weights to bfloat16, measure those, and write everything."""
    torch.nn.Module.to(model, torch.bfloat16)
    torch.nn.Module.to(model.eval(), torch.float32)
    report: dict[str, object] = {
        "heldout_accuracy": accuracy(model, text_tokenizer, args.final_pages),
        "heldout_prompts": args.final_pages * 16,
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if torch.device(args.device).type == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "arguments": {name: value for name, value in vars(args).items() if name not in ("out", "start")},
        "started_from": earlier,
    }
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(args.out)
    text_tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckpt_hf.demo.train", description="Train the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer and training.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--rows", type=int, default=128, help="pages a step")
    parser.add_argument("--offers", type=int, default=8, help="offers a page")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps until the peak")
    parser.add_argument("--text-weight", type=float, default=0.5, help="share of the loss on the offers' text")
    parser.add_argument("--clause-weight", type=float, default=2.0, help="share of the loss on single clauses")
    parser.add_argument("--start", type=Path, help="folder with weights to go on from, instead of random ones")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of three GDN layers and one attention layer")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast the products")
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")
    parser.add_argument("--every", type=int, default=250, help="steps between held-out checks")
    parser.add_argument("--check-pages", type=int, default=32, help="held-out pages of a check")
    parser.add_argument("--final-pages", type=int, default=256, help="held-out pages of the final figure")
    return parser


if __name__ == "__main__":
    print(json.dumps(train(_parser().parse_args()), indent=2))

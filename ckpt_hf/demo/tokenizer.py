"""The tokenizer of the embedded model: byte-level BPE over the catalog's own text, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ckpt_hf.demo import catalog

PAD = "<|pad|>"
END = "<|endoftext|>"
MAX_POSITIONS = 2048

_VOCABULARY = 960
_TRAINING_PAGES = 1500
_OFFERS = 4


def build(seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer on pages and offers of the training split.

    Padding is on the left, as ``generate`` wants it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _texts(seed: int) -> Iterator[str]:
    for page in catalog.pages("train", seed, _TRAINING_PAGES, _OFFERS):
        yield catalog.shared_text(page)
        for offer in page.offers:
            yield f"{catalog.question_text(offer)} {offer.answer}"

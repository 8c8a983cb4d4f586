"""Boundaries as data: token ids of plain text, with the positions of its checkpoints beside them.

A marker in a text changes the ids around it, since tokenizers split text at special tokens, and whoever writes the text
can write markers. :func:`encode` and :func:`encode_chat` give the ids of the unmarked text and take the place of a
checkpoint from the structure of the call, out of the text's reach.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from transformers import BatchEncoding

from .chat_cuts import chat_cuts, read_conversations, render_chat
from .errors import CheckpointRuntimeError, CheckpointValueError, CheckpointWarning
from .markers import MARKER, marker_id
from .plain_text import without_marker
from .seams import align_boundaries, token_boundaries, tokenized_texts

_FILLING = -1


def encode(
    tokenizer: Any,
    parts: Sequence[str] | Sequence[Sequence[str]],
    *,
    padding: bool | str = True,
    padding_side: str | None = "left",
    add_special_tokens: bool = True,
    return_tensors: str | None = "pt",
) -> BatchEncoding:
    """Tokenise texts given in parts, with a checkpoint after every part but the last.

    The ids are those of ``tokenizer("".join(parts))``, except that the marker's characters are plain text. Each
    boundary lies behind the last token that comes from the parts before it alone; which token that is can depend on the
    next part. Rows of the batch that begin with the same text get the same boundary, so that they share it.

    Args:
        tokenizer: a transformers tokenizer, with or without the marker; it is not changed.
        parts: the parts of one prompt, or one sequence of parts a prompt. ``[shared, ""]`` puts the checkpoint at the
            very end.
        padding, padding_side, add_special_tokens, return_tensors: as in a call of the tokenizer.

    Returns:
        What the tokenizer returns, with ``checkpoint_positions`` beside it: int64 ``[B, K]``, the number of tokens
        before each checkpoint, pads not counted, filled with -1. ``model.generate`` takes all of it.

    Warns:
        CheckpointWarning: a checkpoint was dropped because no token lies wholly before it.

    Raises:
        CheckpointValueError: ``parts`` is not as described, or a prompt has no token, or pads are needed and the
            tokenizer has none.
    """
    prompts = _read_parts(parts)
    cuts = [_part_ends(prompt) for prompt in prompts]
    texts = ["".join(prompt) for prompt in prompts]
    return _encode_cut(tokenizer, texts, cuts, padding, padding_side, add_special_tokens, return_tensors)


def encode_chat(
    tokenizer: Any,
    conversations: Sequence[Any],
    *,
    checkpoint_after: int | Sequence[int] | Sequence[Sequence[int]],
    add_generation_prompt: bool = True,
    padding: bool | str = True,
    padding_side: str | None = "left",
    return_tensors: str | None = "pt",
    **chat_template_kwargs: Any,
) -> BatchEncoding:
    """Tokenise chats with checkpoints after messages.

    The ids are those of ``tokenizer.apply_chat_template`` for the whole conversation, except that the marker's
    characters are plain text. A boundary lies where the template is stable: behind the rendering of the messages up to
    that one if the whole conversation begins with it, and else where the whole conversation stops agreeing with every
    continuation by another user message (a template may drop reasoning from earlier turns or refuse a lone system
    message). From there it moves back to a whole token as in :func:`encode`.

    Args:
        tokenizer: a transformers tokenizer with a chat template; it is not changed.
        conversations: one list of messages, or a batch of them.
        checkpoint_after: index of a message, or several, for every conversation, or one sequence of indices a
            conversation. Negative ones count from the end.
        add_generation_prompt: as in ``apply_chat_template``.
        padding, padding_side, return_tensors: as in a call of the tokenizer.
        chat_template_kwargs: passed to the template (``tools``, ``documents``, ``chat_template``, and its own).

    Returns:
        As :func:`encode`.

    Warns:
        CheckpointWarning: a checkpoint was dropped because no token lies wholly before it.

    Raises:
        CheckpointValueError: an index out of range, a wrong type, an argument that cannot be combined with boundaries,
            or a template that can render neither the messages up to a checkpoint nor a continuation of them.
    """
    chats, indices = read_conversations(conversations, checkpoint_after)
    texts, cuts = [], []
    for messages, wanted in zip(chats, indices, strict=True):
        text = render_chat(tokenizer, messages, add_generation_prompt, chat_template_kwargs)
        texts.append(text)
        cuts.append(chat_cuts(tokenizer, messages, text, wanted, chat_template_kwargs))
    return _encode_cut(tokenizer, texts, cuts, padding, padding_side, False, return_tensors)


def _encode_cut(
    tokenizer: Any,
    texts: list[str],
    cuts: list[list[int]],
    padding: bool | str,
    padding_side: str | None,
    add_special_tokens: bool,
    return_tensors: str | None,
) -> BatchEncoding:
    marker = marker_id(tokenizer)
    if len(texts) == 1 and padding in (True, "longest"):
        padding = False  # nothing to pad, so no pad token is needed
    if padding not in (False, "do_not_pad") and tokenizer.pad_token_id is None:
        raise CheckpointValueError(
            "tokenizer has no pad token; set tokenizer.pad_token, or encode one prompt at a time"
        )
    settings: dict[str, Any] = {
        "padding": padding,
        "padding_side": padding_side,
        "add_special_tokens": add_special_tokens,
        "return_attention_mask": True,
    }
    batch: BatchEncoding = tokenizer(texts, **settings)
    if marker is not None and _holds(batch, marker):
        tokenizer = without_marker(tokenizer)
        batch = tokenizer(texts, **settings)
        if _holds(batch, marker):
            raise CheckpointRuntimeError(
                f"the tokenizer's model itself turns text into the id of {MARKER!r}; escape untrusted text instead"
            )
    rows = tokenized_texts(tokenizer, batch, texts, add_special_tokens)
    for index, row in enumerate(rows):
        if not row.ids:
            raise CheckpointValueError(f"prompt {index} gives no token; a prompt needs at least one")
    boundaries = [token_boundaries(tokenizer, row, row_cuts) for row, row_cuts in zip(rows, cuts, strict=True)]
    align_boundaries(rows, cuts, boundaries)
    batch["checkpoint_positions"] = _filled(boundaries)
    result: BatchEncoding = batch.convert_to_tensors(return_tensors)
    return result


def _holds(batch: BatchEncoding, marker: int) -> bool:
    return any(marker in ids for ids in batch["input_ids"])


def _filled(boundaries: list[list[int]]) -> list[list[int]]:
    """Return the boundaries as rows of one length, sorted and each once, and warn about those that are 0."""
    kept = [sorted({boundary for boundary in row if boundary}) for row in boundaries]
    dropped = [index for index, row in enumerate(boundaries) if 0 in row]
    if dropped:
        warnings.warn(
            f"a checkpoint of prompt {', '.join(map(str, dropped))} was dropped: no token lies wholly in the text "
            "before it",
            CheckpointWarning,
            stacklevel=4,
        )
    width = max(map(len, kept))
    return [row + [_FILLING] * (width - len(row)) for row in kept]


def _read_parts(parts: Any) -> list[list[str]]:
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise CheckpointValueError("parts must be a list of strings, or a list of such lists, and not empty")
    prompts = [list(parts)] if isinstance(parts[0], str) else [list(prompt) for prompt in parts if _is_prompt(prompt)]
    if not all(isinstance(part, str) for prompt in prompts for part in prompt):
        raise CheckpointValueError("parts mixes strings with something else; one prompt is a list of strings")
    return prompts


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        raise CheckpointValueError("parts of a batch must be one list of strings for each prompt, none of them empty")
    return True


def _part_ends(prompt: list[str]) -> list[int]:
    ends, end = [], 0
    for part in prompt[:-1]:
        end += len(part)
        ends.append(end)
    return ends

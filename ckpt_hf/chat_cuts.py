"""Where, in a rendered chat, a checkpoint after one of its messages belongs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import CheckpointValueError
from .integers import is_integer
from .seams import common_length

# Two continuations that differ from their first character: where they agree, what the next user says does not matter.
_PROBES = ("0", "x")
_TEXT_ONLY = {"tokenize", "return_dict"}
_UNSUPPORTED = {
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
}


def read_conversations(conversations: Any, checkpoint_after: Any) -> tuple[list[list[Any]], list[list[int]]]:
    """Return a batch of message lists, and for each the indices (0 or more) of its checkpoints.

    Raises:
        CheckpointValueError: a wrong type, an empty conversation, or an index out of range.
    """
    if isinstance(conversations, (str, Mapping)) or not isinstance(conversations, Sequence) or not conversations:
        raise CheckpointValueError("conversations must be a list of messages or a list of such lists, and not empty")
    batch = [conversations] if isinstance(conversations[0], Mapping) else conversations
    chats: list[list[Any]] = []
    for row, chat in enumerate(batch):
        chat = getattr(chat, "messages", chat)
        if not isinstance(chat, Sequence) or not chat or not all(isinstance(message, Mapping) for message in chat):
            raise CheckpointValueError(f"conversation {row} must be a list of messages (dicts), and not empty")
        chats.append(list(chat))
    return chats, [_indices(chat, wanted, row) for row, (chat, wanted) in enumerate(_spread(chats, checkpoint_after))]


def render_chat(tokenizer: Any, messages: list[Any], add_generation_prompt: bool, settings: Mapping[str, Any]) -> str:
    """Return the conversation as its template writes it.

    Raises:
        CheckpointValueError: ``settings`` holds an argument that cannot be combined with boundaries, or there is no
            chat template.
    """
    for name in sorted((_TEXT_ONLY | _UNSUPPORTED) & settings.keys()):
        raise CheckpointValueError(
            f"{name} cannot be given to encode_chat, which always tokenises the whole conversation and returns a "
            "BatchEncoding; pass arguments of the chat template only"
        )
    if settings.get("chat_template") is None and getattr(tokenizer, "chat_template", None) is None:
        raise CheckpointValueError("tokenizer has no chat template; set tokenizer.chat_template, or pass chat_template")
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, **settings
    )
    return str(rendered)


def chat_cuts(
    tokenizer: Any, messages: list[Any], text: str, indices: Sequence[int], settings: Mapping[str, Any]
) -> list[int]:
    """Return for each index the length of the start of ``text``, the whole rendering, that is stable after it.

    Raises:
        CheckpointValueError: the template renders neither the messages up to an index nor a continuation of them.
    """
    settings = {name: value for name, value in settings.items() if name != "continue_final_message"}
    return [_cut(tokenizer, messages[: index + 1], text, index, settings) for index in indices]


def _cut(tokenizer: Any, start: list[Any], text: str, index: int, settings: Mapping[str, Any]) -> int:
    alone, refusal = _try_render(tokenizer, start, settings)
    if alone is not None and text.startswith(alone):
        return len(alone)
    # The template writes these messages differently once something follows.
    probes = [_try_render(tokenizer, [*start, {"role": "user", "content": probe}], settings)[0] for probe in _PROBES]
    cut = 0 if alone is None else common_length(text, alone)
    if None not in probes:
        cut = max(cut, min(common_length(text, probe) for probe in probes if probe is not None))
    elif alone is None:
        raise CheckpointValueError(
            f"checkpoint_after {index}: the chat template renders neither the messages up to there nor the same with "
            f"another user message behind them; choose another message ({refusal})"
        ) from refusal
    return cut


def _try_render(
    tokenizer: Any, messages: list[Any], settings: Mapping[str, Any]
) -> tuple[str | None, Exception | None]:
    """Render without a generation prompt; a template may refuse a conversation with an exception of any type."""
    try:
        return render_chat(tokenizer, messages, False, settings), None
    except Exception as refusal:
        return None, refusal


def _spread(chats: list[list[Any]], checkpoint_after: Any) -> list[tuple[list[Any], list[Any]]]:
    if isinstance(checkpoint_after, str):
        raise CheckpointValueError("checkpoint_after must be an integer or a sequence of integers, got str")
    if not isinstance(checkpoint_after, Sequence):
        return [(chat, [checkpoint_after]) for chat in chats]
    if not any(isinstance(wanted, Sequence) for wanted in checkpoint_after):
        return [(chat, list(checkpoint_after)) for chat in chats]
    if len(checkpoint_after) != len(chats) or not all(isinstance(wanted, Sequence) for wanted in checkpoint_after):
        raise CheckpointValueError(
            f"checkpoint_after must hold one sequence of indices for each of the {len(chats)} conversations"
        )
    return [(chat, list(wanted)) for chat, wanted in zip(chats, checkpoint_after, strict=True)]


def _indices(chat: list[Any], wanted: list[Any], row: int) -> list[int]:
    found = set()
    for value in wanted:
        if not is_integer(value):
            raise CheckpointValueError(f"checkpoint_after must hold integers, got {type(value).__name__}")
        index = operator.index(value)
        if not -len(chat) <= index < len(chat):
            raise CheckpointValueError(
                f"checkpoint_after {index} is outside conversation {row} of {len(chat)} messages; "
                f"{-len(chat)} to {len(chat) - 1} are allowed"
            )
        found.add(index % len(chat))
    return sorted(found)

"""Boundaries behind messages of a chat. Numbers in names are rows of the cases that users reported elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ckpt_hf.encode import encode_chat
from ckpt_hf.errors import CheckpointValueError
from ckpt_hf.markers import MARKER

from .tokenizers import marked, rows_of, unmarked

SYSTEM = {"role": "system", "content": "Compare the items."}
FIRST = {"role": "user", "content": "red shoes"}
ANSWER = {"role": "assistant", "content": "<think>\nthey differ\n</think>\n\nNo."}
SECOND = {"role": "user", "content": "blue mug"}


def chat_rows(name: str, conversations: Any, after: Any, **arguments: Any) -> list[tuple[list[int], list[int]]]:
    return rows_of(encode_chat(marked(name), conversations, checkpoint_after=after, **arguments))


@pytest.mark.parametrize("name", ["qwen", "bpe", "slow"])
@pytest.mark.parametrize("prompt", [True, False])
def test_29_chat_ids_are_those_of_the_template(name: str, prompt: bool) -> None:
    chat = [SYSTEM, FIRST, ANSWER, SECOND]
    expected = unmarked(name).apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]
    ((ids, boundaries),) = chat_rows(name, chat, [0, 1, 2, 3], add_generation_prompt=prompt)
    assert ids == expected
    assert len(boundaries) == 4


def test_29_boundary_follows_the_messages_where_the_template_keeps_them() -> None:
    tokenizer = marked("qwen")
    ((ids, (boundary,)),) = chat_rows("qwen", [SYSTEM, FIRST, ANSWER, SECOND], 1)
    expected = tokenizer.apply_chat_template([SYSTEM, FIRST], tokenize=False)
    assert tokenizer.decode(ids[:boundary]) == expected
    ((_, (negative,)),) = chat_rows("qwen", [SYSTEM, FIRST, ANSWER, SECOND], -3)
    assert negative == boundary


def test_29_41_a_template_that_refuses_a_lone_system_message_still_gives_a_boundary() -> None:
    tokenizer = marked("qwen")
    rows = chat_rows("qwen", [[SYSTEM, FIRST], [SYSTEM, SECOND]], 0)
    prefixes = {tuple(ids[:boundary]) for ids, (boundary,) in rows}
    assert len(prefixes) == 1
    assert tokenizer.decode(prefixes.pop()) == "<|im_start|>system\nCompare the items.<|im_end|>\n<|im_start|>user\n"


def test_29_a_growing_chat_keeps_the_boundary_where_reasoning_was_dropped() -> None:
    tokenizer = marked("qwen")
    ((short, (boundary,)),) = chat_rows("qwen", [SYSTEM, FIRST, ANSWER, SECOND], 2)
    ((long, (first, second)),) = chat_rows("qwen", [SYSTEM, FIRST, ANSWER, SECOND, ANSWER, FIRST], [2, 4])
    assert short[:boundary] == long[:first]
    assert "they differ" not in tokenizer.decode(long[:second])
    assert tokenizer.decode(long[:first]).endswith("No.<|im_end|>\n<|im_start|>user\n")


def test_29_the_last_answer_is_cut_where_a_later_user_would_change_it() -> None:
    """While the answer is last its reasoning is shown, so the whole rendering begins with the messages' own."""
    tokenizer = marked("qwen")
    ((ids, (boundary,)),) = chat_rows("qwen", [SYSTEM, FIRST, ANSWER], 2)
    assert tokenizer.decode(ids[:boundary]).endswith("No.<|im_end|>\n")
    ((ids, (boundary,)),) = chat_rows("qwen", [SYSTEM, FIRST, ANSWER], 2, add_generation_prompt=False)
    assert boundary == len(ids)


def test_chats_share_a_boundary_also_without_special_tokens_at_the_seam() -> None:
    rows = chat_rows("bpe", [[SYSTEM, FIRST], [SYSTEM, SECOND], [SYSTEM, ANSWER]], 0)
    assert len({tuple(ids[:boundary]) for ids, (boundary,) in rows}) == 1


def test_23_the_marker_in_a_message_is_plain_text() -> None:
    chat = [SYSTEM, {"role": "user", "content": f"ignore {MARKER} that"}]
    expected = unmarked("qwen").apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    ((ids, boundaries),) = chat_rows("qwen", chat, 0)
    assert ids == expected
    ((_, same),) = chat_rows("qwen", [SYSTEM, {"role": "user", "content": "ignore that"}], 0)
    assert boundaries == same


def test_indices_for_each_conversation_and_template_arguments() -> None:
    rows = chat_rows("qwen", [[SYSTEM, FIRST, ANSWER, SECOND], [FIRST]], [[0, 1], []])
    assert [len(boundaries) for _, boundaries in rows] == [2, 0]
    template = "{% for message in messages %}{{ mark + message.content }}{% endfor %}"
    ((ids, (boundary,)),) = chat_rows("qwen", [FIRST, SECOND], 0, chat_template=template, mark="#")
    assert marked("qwen").decode(ids[:boundary]) == "#red shoes"


def test_continuing_the_last_message() -> None:
    open_ended = [FIRST, {"role": "assistant", "content": "It is"}]
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    ((ids, boundaries),) = chat_rows("qwen", open_ended, [0, 1], **arguments)
    assert ids == unmarked("qwen").apply_chat_template(open_ended, **arguments)["input_ids"]
    assert boundaries[1] == len(ids)


REFUSING = "{% if messages | length < 4 %}{{ raise_exception('too short') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("conversations", "after", "arguments", "message"),
    [
        ([FIRST], 1, {}, "checkpoint_after 1 is outside conversation 0 of 1 messages; -1 to 0 are allowed"),
        ([[FIRST, SECOND], [FIRST]], 1, {}, "outside conversation 1"),
        ([FIRST], -2, {}, "outside conversation 0"),
        ([FIRST], 0.5, {}, "checkpoint_after must hold integers, got float"),
        ([FIRST], True, {}, "checkpoint_after must hold integers, got bool"),
        ([FIRST], "0", {}, "checkpoint_after must be an integer"),
        ([[FIRST], [FIRST]], [[0]], {}, "one sequence of indices for each of the 2"),
        ([[FIRST], [FIRST]], [[0], 0], {}, "one sequence of indices for each of the 2"),
        ([], 0, {}, "conversations must be"),
        ("red shoes", 0, {}, "conversations must be"),
        ([[FIRST], []], 0, {}, "conversation 1 must be a list of messages"),
        ([[FIRST], ["red"]], 0, {}, "conversation 1 must be a list of messages"),
        ([FIRST], 0, {"tokenize": True}, "tokenize cannot be given"),
        ([FIRST], 0, {"truncation": True}, "truncation cannot be given"),
        ([FIRST], 0, {"sanitize_control_tokens": True}, "sanitize_control_tokens cannot be given"),
        ([FIRST] * 4, 0, {"chat_template": REFUSING}, "checkpoint_after 0: the chat template renders neither"),
    ],
)
def test_wrong_chats_are_named(conversations: Any, after: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointValueError, match=message):
        encode_chat(marked("qwen"), conversations, checkpoint_after=after, **arguments)


def test_a_tokenizer_without_a_chat_template_is_named() -> None:
    tokenizer = copy.deepcopy(unmarked("bpe"))
    tokenizer.chat_template = None
    with pytest.raises(CheckpointValueError, match="tokenizer has no chat template"):
        encode_chat(tokenizer, [FIRST], checkpoint_after=0)

"""Reading prompts out of batches. Numbers in names are rows of the cases that users reported elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_hf.errors import CheckpointError, CheckpointValueError
from ckpt_hf.markers import MARKER, escape, marker_id
from ckpt_hf.prompts import InteriorPaddingError, Prompt, pad_prompts, read_prompts

from .tokenizers import marked, unmarked

M, PAD = 99, 0


def read(rows: Any, mask: Any = None, **settings: Any) -> list[Prompt]:
    mask = None if mask is None else torch.tensor(mask)
    return read_prompts(torch.tensor(rows), mask, **{"marker_id": M, **settings})


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[list[int]]]:
    """Rows of ids, masks, and what each row means: its tokens and the positions of its markers."""
    width = draw(st.integers(1, 12))
    rows, masks, tokens, marks = [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        left = draw(st.integers(0, width - 1))
        right = draw(st.integers(0, width - 1 - left))
        body = draw(
            st.lists(st.sampled_from([M, 1, 2, 3]), min_size=width - left - right, max_size=width - left - right)
        )
        body[draw(st.integers(0, len(body) - 1))] = 5  # at least one token
        padding = draw(st.lists(st.sampled_from([PAD, M, 4]), min_size=left + right, max_size=left + right))
        rows.append(padding[:left] + body + padding[left:])
        masks.append([0] * left + [1] * len(body) + [0] * right)
        tokens.append([token for token in body if token != M])
        marks.append([sum(t != M for t in body[:place]) for place, token in enumerate(body) if token == M])
    return rows, masks, tokens, marks


@settings(deadline=None, max_examples=200)
@given(batch=batches(), kind=st.sampled_from([torch.int64, torch.int32, torch.bool]))
def test_pads_and_markers_go_and_boundaries_count_tokens(batch: Any, kind: torch.dtype) -> None:
    rows, masks, tokens, marks = batch
    ids, mask = torch.tensor(rows), torch.tensor(masks).to(kind)
    kept = ids.clone(), mask.clone()
    prompts = read_prompts(ids, mask, marker_id=M, pad_token_id=PAD)
    assert [list(prompt.token_ids) for prompt in prompts] == tokens
    assert [list(prompt.boundaries) for prompt in prompts] == [sorted({m for m in row if m > 0}) for row in marks]
    assert torch.equal(ids, kept[0]) and torch.equal(mask, kept[1])


@settings(deadline=None, max_examples=100)
@given(batch=batches(), data=st.data())
def test_positions_as_data_equal_markers(batch: Any, data: st.DataObject) -> None:
    rows, masks, _, marks = batch
    as_markers = read(rows, masks)
    plain = pad_prompts(as_markers, PAD, "cpu")
    width = max(map(len, marks))
    filled = torch.tensor([row + [-1] * (width - len(row)) for row in marks], dtype=torch.int64).reshape(
        len(marks), width
    )
    form = data.draw(st.sampled_from([filled, filled.to(torch.int32), marks]))
    assert read_prompts(*plain, marker_id=None, checkpoint_positions=form) == as_markers
    assert read_prompts(*plain, marker_id=M, checkpoint_positions=form) == as_markers


@settings(deadline=None, max_examples=50)
@given(batch=batches())
def test_pad_prompts_is_a_left_padded_batch_of_the_stripped_ids(batch: Any) -> None:
    rows, masks, tokens, _ = batch
    ids, mask = pad_prompts(read(rows, masks), PAD, "cpu")
    width = max(map(len, tokens))
    assert ids.tolist() == [[PAD] * (width - len(row)) + row for row in tokens]
    assert mask.tolist() == [[0] * (width - len(row)) + [1] * len(row) for row in tokens]
    assert ids.dtype == mask.dtype == torch.int64 and ids.is_contiguous()


@pytest.mark.parametrize(
    ("row", "boundaries", "note"),
    [
        ([M, 1, 2], (), "before the first token was ignored"),
        ([1, M, M, 2], (1,), "after token 1 was asked for more than once"),
        ([1, 2, M], (2,), "end of the prompt is saved"),
        ([1, M, 2], (1,), None),
        ([1, M, 2, M, 3], (1, 2), None),
        ([1, 2], (), None),
    ],
)
def test_odd_markers_are_noted_and_never_fail(row: list[int], boundaries: tuple[int, ...], note: str | None) -> None:
    (prompt,) = read([row])
    assert prompt.boundaries == boundaries
    assert len(prompt.notes) == (note is not None)
    assert note is None or note in prompt.notes[0]


def test_positions_and_markers_are_merged() -> None:
    (prompt,) = read([[1, M, 2, 3]], checkpoint_positions=[2, 1, 0])
    assert prompt.boundaries == (1, 2)
    assert len(prompt.notes) == 2  # the 0, and the 1 that the marker asked for too


@pytest.mark.parametrize(
    "positions", [[1, 2], (1, 2), [[1, 2]], [(1, 2)], torch.tensor([1, 2]), [torch.tensor(1), 2], [2, -1, 1]]
)
def test_positions_of_one_row_in_every_form(positions: Any) -> None:
    assert read([[1, 2, 3]], checkpoint_positions=positions)[0].boundaries == (1, 2)


def test_no_positions_at_all() -> None:
    for positions in (None, [[], []], torch.empty(2, 0, dtype=torch.int64), torch.full((2, 3), -1)):
        assert [prompt.boundaries for prompt in read([[1, 2], [3, 4]], checkpoint_positions=positions)] == [(), ()]


def test_interior_padding_has_its_own_error() -> None:
    with pytest.raises(InteriorPaddingError, match="attention_mask row 1 is 0 between real tokens"):
        read([[1, 2, 3], [1, 2, 3]], [[1, 1, 1], [1, 0, 1]])


def test_27_a_marker_hidden_by_the_mask_is_still_stripped_and_counts() -> None:
    assert read([[1, M, 3]], [[1, 0, 1]])[0] == Prompt((1, 3), (1,))
    assert read([[M, 1, 3, M]], [[0, 1, 1, 0]])[0] == Prompt((1, 3), ())


def test_63_64_an_id_outside_the_vocabulary_never_stays() -> None:
    tokenizer = marked("qwen")
    (prompt,) = read_prompts(
        tokenizer(f"red {MARKER}shoes", return_tensors="pt")["input_ids"], marker_id=marker_id(tokenizer)
    )
    assert max(prompt.token_ids) < len(unmarked("qwen")) <= (marker_id(tokenizer) or 0)
    assert prompt.boundaries == (2,)  # "red", " "


@pytest.mark.parametrize("side", ["left", "right"])
def test_qwen_batch_padded_on_either_side(side: str) -> None:
    tokenizer = marked("qwen")
    texts = [f"the red shoes{MARKER} fit", "nothing marked", f"a\n{MARKER}longer one {MARKER}with two of them"]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
    prompts = read_prompts(batch["input_ids"], batch["attention_mask"], marker_id=marker_id(tokenizer))
    for text, prompt in zip(texts, prompts, strict=True):
        pieces = [tokenizer(piece)["input_ids"] for piece in text.split(MARKER)]
        assert list(prompt.token_ids) == [token for piece in pieces for token in piece]
        assert list(prompt.boundaries) == [sum(map(len, pieces[:n])) for n in range(1, len(pieces))]


@pytest.mark.parametrize("name", ["qwen", "bpe"])
def test_23_markers_through_a_chat_template_and_not_from_users(name: str) -> None:
    tokenizer = marked(name)
    attack = f"ignore this {MARKER} and mamba_checkpoint|>"
    chat = [
        {"role": "system", "content": f"You compare items.{MARKER}"},
        {"role": "user", "content": escape(attack)},
    ]
    batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    (prompt,) = read_prompts(batch["input_ids"], batch["attention_mask"], marker_id=marker_id(tokenizer))
    before = tokenizer.decode(list(prompt.token_ids[: prompt.boundaries[0]]))
    assert len(prompt.boundaries) == 1 and before.endswith("You compare items.")
    assert marker_id(tokenizer) not in prompt.token_ids


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [[1]]}, "input_ids must be a tensor"),
    ({"input_ids": torch.tensor([1, 2])}, r"input_ids must have shape \[B, L\]"),
    ({"input_ids": torch.empty(0, 3, dtype=torch.int64)}, "B >= 1"),
    ({"input_ids": IDS.float()}, "input_ids must hold integers"),
    ({"input_ids": IDS.bool()}, "input_ids must hold integers"),
    ({"input_ids": IDS.to("meta")}, "input_ids is on the meta device"),
    ({"input_ids": torch.empty(1, 0, dtype=torch.int64)}, "input_ids row 0 holds no token"),
    ({"input_ids": torch.tensor([[1], [M]])}, "input_ids row 1 holds no token"),
    ({"input_ids": torch.tensor([[1, -100]])}, "input_ids row 0 holds the negative id -100"),
    ({"attention_mask": [[1]]}, "attention_mask must be a tensor"),
    (
        {"attention_mask": torch.ones(2, 1, 3, 3, dtype=torch.int64)},
        r"attention_mask must have the shape .*\[2, 1, 3, 3\]",
    ),
    ({"attention_mask": torch.ones(2, 2, dtype=torch.int64)}, "attention_mask must have the shape"),
    ({"attention_mask": torch.ones(2, 3)}, "attention_mask must hold integers"),
    ({"attention_mask": torch.full((2, 3), 2)}, "attention_mask row 0 holds values other than 0 and 1"),
    ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "input_ids row 1 holds no token"),
    ({"attention_mask": torch.ones(2, 3, dtype=torch.int64, device="meta")}, "attention_mask is on meta"),
    ({"checkpoint_positions": 1}, "checkpoint_positions must be a tensor"),
    ({"checkpoint_positions": "12"}, "checkpoint_positions must be a tensor"),
    ({"checkpoint_positions": [1, 2]}, "checkpoint_positions must be 2 sequences"),
    ({"checkpoint_positions": [[1]]}, "one row for each of the 2 rows"),
    ({"checkpoint_positions": [[1], [1.5]]}, "checkpoint_positions must be 2 sequences of integers"),
    ({"checkpoint_positions": [[1], [True]]}, "a bool is not a position"),
    ({"checkpoint_positions": torch.tensor([1, 2])}, "checkpoint_positions must have shape"),
    ({"checkpoint_positions": torch.ones(3, 1, dtype=torch.int64)}, "checkpoint_positions must have shape"),
    ({"checkpoint_positions": torch.ones(2, 1)}, "checkpoint_positions must hold integers"),
    ({"checkpoint_positions": torch.ones(2, 1, dtype=torch.int64, device="meta")}, "checkpoint_positions is on meta"),
    ({"checkpoint_positions": [[4], []]}, "checkpoint_positions row 0 holds 4, but the prompt has 3 tokens"),
    ({"checkpoint_positions": [[], [-2]]}, "checkpoint_positions row 1 holds -2"),
    ({"pad_token_id": M}, f"pad_token_id {M} is the marker's id"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointValueError, match=message) as caught:
        read_prompts(**{"input_ids": IDS, "marker_id": M, **arguments})
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, CheckpointError)


def test_pad_prompts_needs_a_pad_only_for_ragged_prompts() -> None:
    even = [Prompt((1, 2), ()), Prompt((3, 4), ())]
    assert pad_prompts(even, None, "cpu")[0].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(CheckpointValueError, match="pad_token_id is None but the prompts have 1 to 2 tokens"):
        pad_prompts([*even, Prompt((1,), ())], None, "cpu")
    with pytest.raises(CheckpointValueError, match="prompts is empty"):
        pad_prompts([], PAD, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_batch_on_the_device_is_read_with_one_copy() -> None:
    ids, mask = torch.tensor([[PAD, 1, M, 2]]).cuda(), torch.tensor([[0, 1, 1, 1]]).cuda()
    positions = torch.tensor([[2]]).cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prompts = read_prompts(ids, mask, marker_id=M, checkpoint_positions=positions)
    assert prompts[0].token_ids == (1, 2) and prompts[0].boundaries == (1, 2)
    assert sum(event.count for event in profile.key_averages() if "DtoH" in event.key) == 1

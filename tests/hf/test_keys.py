"""Identity of checkpoints: what a key depends on, and what it does not."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt_hf.errors import CheckpointValueError
from ckpt_hf.keys import DIGEST_BYTES, KeyScope

from .simulation import checkpoint_keys

ids = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**40)), min_size=1, max_size=80)
identities = st.binary(max_size=6)
salts = st.text(max_size=6)


def key(token_ids: list[int], identity: bytes = b"model", salt: str = "") -> bytes:
    return checkpoint_keys(token_ids, [len(token_ids)], identity, salt)[0]


@settings(max_examples=200, deadline=None)
@given(ids, st.data(), identities, salts)
def test_independent_of_what_follows_and_of_other_boundaries(
    token_ids: list[int], data: st.DataObject, identity: bytes, salt: str
) -> None:
    boundaries = sorted(data.draw(st.sets(st.integers(1, len(token_ids)), min_size=1)))
    keys = checkpoint_keys(token_ids, boundaries, identity, salt)
    assert keys == tuple(key(token_ids[:boundary], identity, salt) for boundary in boundaries)
    assert len(set(keys)) == len(keys)
    assert {len(k) for k in keys} == {DIGEST_BYTES}


@settings(max_examples=200, deadline=None)
@given(ids, ids)
def test_other_tokens_other_key(first: list[int], second: list[int]) -> None:
    assert (key(first) == key(second)) == (first == second)


@settings(max_examples=200, deadline=None)
@given(st.tuples(identities, salts), st.tuples(identities, salts))
def test_other_model_or_salt_other_key(first: tuple[bytes, str], second: tuple[bytes, str]) -> None:
    assume(first != second)
    assert key([1, 2], *first) != key([1, 2], *second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((b"ab", "c"), (b"a", "bc")),
        ((b"ab", ""), (b"", "ab")),
        ((b"", "\x01"), (b"\x01", "")),
        ((b"m", "\ud800"), (b"m", "\udfff")),
        ((b"m", "é"), (b"m", "e\u0301")),
    ],
    ids=["moved", "swapped", "control", "lone surrogates", "unnormalised"],
)
def test_parts_cannot_be_moved_from_one_to_the_other(first: tuple[bytes, str], second: tuple[bytes, str]) -> None:
    assert key([1], *first) != key([1], *second)


def test_tokens_cannot_pass_for_a_salt() -> None:
    """The salt's bytes, read as one token, in front of the prompt give another key than the salt itself."""
    token = int.from_bytes(b"saltsalt", "little")
    assert key([token, 5], salt="") != key([5], salt="saltsalt")


def test_no_boundary_no_key() -> None:
    assert checkpoint_keys([1, 2, 3], [], b"model", "") == ()


def test_the_same_in_every_process() -> None:
    """A key is a plain digest of bytes: nothing of it depends on the interpreter's hash seed."""
    assert key([1, 2, 3], b"model", "salt").hex() == (
        "3e530c510cb5155a88bc30098dca53e97a5b2620e30c9b48d45c89d9ce109f50"
    )


IMAGE, OTHER_IMAGE = (bytes([i]) * 32 for i in (1, 2))


def media_keys(*media: tuple[int, bytes]) -> tuple[bytes, ...]:
    return KeyScope(b"model").keys([1, 7, 7, 7, 2, 3], [1, 4, 6], media)


def test_an_image_is_a_part_of_every_key_behind_it_27_72() -> None:
    """Placeholder ids are the same for all images, so without its content one image would get another's states."""
    plain, first, second = media_keys(), media_keys((1, IMAGE)), media_keys((1, OTHER_IMAGE))
    assert plain[0] == first[0] == second[0]
    assert len({plain[1], first[1], second[1]}) == len({plain[2], first[2], second[2]}) == 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([IMAGE, OTHER_IMAGE])), max_size=3, unique_by=lambda m: m[0]),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([IMAGE, OTHER_IMAGE])), max_size=3, unique_by=lambda m: m[0]),
)
def test_same_images_at_the_same_places_same_key(
    first: list[tuple[int, bytes]], second: list[tuple[int, bytes]]
) -> None:
    keys = [KeyScope(b"m").keys([5] * 10, [10], sorted(media)) for media in (first, second)]
    assert (keys[0] == keys[1]) == (sorted(first) == sorted(second))


@pytest.mark.parametrize("size", [0, 2, 15])
def test_a_short_image_digest_is_refused_73(size: int) -> None:
    with pytest.raises(CheckpointValueError, match=f"media digest at position 1 has {size} bytes; at least 16"):
        media_keys((1, bytes(size)))

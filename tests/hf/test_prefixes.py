"""Prefixes that prompts share beyond the boundaries that they declare, against looking at every prompt."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_hf.checkpoint import Checkpoint
from ckpt_hf.keys import KeyScope, pack_tokens
from ckpt_hf.prefixes import PrefixIndex

SCOPE, OTHER = KeyScope(b"m"), KeyScope(b"m", "salt")
tokens = st.lists(st.one_of(st.integers(0, 1), st.sampled_from([255, 256, 2**40])), max_size=7)


def checkpoint(token_ids: list[int], scope: KeyScope | None = SCOPE) -> Checkpoint:
    return Checkpoint(repr(token_ids).encode(), tuple(token_ids), 1, scope=scope)


def common(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@settings(max_examples=500, deadline=None)
@given(st.lists(tokens.filter(bool), unique_by=tuple, max_size=12), st.lists(tokens, max_size=5), st.data())
def test_against_looking_at_every_prompt(stored: list[list[int]], recent: list[list[int]], data: st.DataObject) -> None:
    index = PrefixIndex()
    checkpoints = {tuple(ids): checkpoint(ids) for ids in stored}
    for one in checkpoints.values():
        index.add(one)
    for ids in recent:
        index.remember(SCOPE, pack_tokens(ids))
    if stored:
        for ids in data.draw(st.lists(st.sampled_from(stored), unique_by=tuple), label="removed"):
            index.remove(checkpoints.pop(tuple(ids)))
    known = [*map(list, checkpoints), *recent] if checkpoints else []
    for wanted in [*data.draw(st.lists(tokens, max_size=4), label="wanted"), *stored]:
        packed = pack_tokens(wanted)
        prefixes = [c for ids, c in checkpoints.items() if tuple(wanted[: len(ids)]) == ids]
        assert index.deepest(SCOPE, packed) is max(prefixes, key=lambda c: len(c.token_ids), default=None)
        if checkpoints:
            assert index.overlap(SCOPE, packed) == max((common(wanted, ids) for ids in known), default=0)
        assert index.deepest(OTHER, packed) is None
        assert index.overlap(OTHER, packed) == 0
    for one in checkpoints.values():
        index.remove(one)
    assert len(index) == 0


def test_one_without_a_scope_is_not_found() -> None:
    index = PrefixIndex()
    index.add(one := checkpoint([1, 2], None))
    assert index.deepest(SCOPE, pack_tokens([1, 2, 3])) is None
    index.remove(one)
    assert len(index) == 0


def test_only_the_latest_prompts_are_remembered() -> None:
    index = PrefixIndex()
    index.add(checkpoint([0]))
    for i in range(1000):
        index.remember(SCOPE, pack_tokens([1000 + i, 1, 2]))
    assert index.overlap(SCOPE, pack_tokens([1000, 1])) == 0
    assert index.overlap(SCOPE, pack_tokens([1999, 1])) == 2
    assert len(index._scopes[SCOPE]._sorted) < 100

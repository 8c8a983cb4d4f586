"""Where boundaries would pay: the prefixes that the prompts of a log share, and what a checkpoint at each is worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from .advice import Advice, AdvisedBoundary
from .boundary_choice import choose_boundaries, remove, saved_tokens
from .checkpoint_bytes import CheckpointBytes, checkpoint_bytes
from .errors import CheckpointValueError
from .integers import is_integer
from .logged_prompts import LoggedPrompt, read_log
from .prefix_tree import SharedPrefix, shared_prefixes, sort_prompts
from .stable_cuts import end_of_token, stable_tokens

_TAIL = 48


def advise(
    prompts: Iterable[Any],
    tokenizer: Any = None,
    *,
    model: Any = None,
    salts: Sequence[str] | None = None,
    min_saved: int = 256,
    cache_bytes: int | None = None,
    console: Console | None = None,
    quiet: bool = False,
) -> Advice:
    """Read a log of prompts and tell where boundaries would save computation.

    A boundary is advised where at least two prompts of one caller go on differently and no other advised boundary saves
    the same tokens. For prompts that are text it lies where the tokens stay the same whatever follows the shared text.
    Boundaries that prompts have already (markers) are counted, and are advised only where they pay.

    Args:
        prompts: texts or sequences of token ids, in any order; or a batch of a tokenizer or of :func:`ckpt_hf.encode`,
            whose pads are left out.
        tokenizer: needed for texts; for ids it only shows text.
        model: a model or its configuration, for the bytes that a checkpoint costs; without it none are told.
        salts: the caller of each prompt; prompts of different callers share nothing. None: one caller.
        min_saved: tokens over the whole log that a boundary must save beyond the others to be worth a checkpoint.
        cache_bytes: limit for all advised checkpoints together; needs ``model``.
        console: where to print; the terminal by default.
        quiet: print nothing.

    Returns:
        The advice, best first; ``print`` of rich shows it.

    Raises:
        CheckpointValueError: no prompts, an empty one, text without a tokenizer, or arguments that do not fit together.
    """
    if console is not None and not isinstance(console, Console):
        raise CheckpointValueError(f"console must be a rich.console.Console or None, got {type(console).__name__}")
    log = read_log(prompts, tokenizer)
    _check_salts(salts, len(log))
    if cache_bytes is not None and model is None:
        raise CheckpointValueError("cache_bytes needs a model or its configuration, to know what a checkpoint takes")
    _check_limit("min_saved", min_saved, 1)
    if cache_bytes is not None:
        _check_limit("cache_bytes", cache_bytes, 0)
    size = checkpoint_bytes(model) if model is not None else None
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for i in range(len(log)):
        groups[salts[i] if salts is not None else ""].append(i)
    forest = [_Group([log[i] for i in members], members, tokenizer, min_saved) for members in groups.values()]
    if cache_bytes is not None and size is not None:
        _fit(forest, size, min_saved, cache_bytes)
    found = [boundary for group in forest for boundary in group.boundaries(size)]
    found.sort(key=lambda boundary: (-boundary.tokens_saved, boundary.example))
    advice = Advice(tuple(found), len(log), sum(len(prompt.ids) for prompt in log), min_saved)
    if not quiet:
        (console or Console()).print(advice)
    return advice


def _check_limit(name: str, value: Any, least: int) -> None:
    if not is_integer(value) or value < least:
        raise CheckpointValueError(f"{name} must be an int of at least {least}, got {value!r}")


def _check_salts(salts: Any, count: int) -> None:
    if salts is None:
        return
    if isinstance(salts, str) or not isinstance(salts, Sequence) or not all(isinstance(salt, str) for salt in salts):
        raise CheckpointValueError(f"salts must be a sequence of str or None, got {salts!r}")
    if len(salts) != count:
        raise CheckpointValueError(f"salts must have one value for each of the {count} prompts, got {len(salts)}")


def _fit(forest: list[_Group], size: CheckpointBytes, min_saved: int, limit: int) -> None:
    """Leave out what adds least a byte, over all callers, until the rest fits."""
    kept = choose_boundaries(
        [prefix for group in forest for prefix in group.kept],
        min_saved,
        lambda prefix: size.fixed + size.per_token * (prefix.tokens - prefix.parent_tokens),
        limit,
    )
    for group in forest:
        group.kept = [prefix for prefix in group.kept if prefix in set(kept)]


@dataclass(slots=True)
class _Cut:
    """Where a boundary can be declared: after ``characters`` of the text of prompts that share it."""

    characters: int | None
    tail: str | None


class _Group:
    """The prompts of one caller."""

    def __init__(self, log: list[LoggedPrompt], indices: list[int], tokenizer: Any, min_saved: int) -> None:
        order, common = sort_prompts([prompt.ids for prompt in log])
        self.log = [log[i] for i in order]
        self.indices = [indices[i] for i in order]
        self.tokenizer = tokenizer
        tree = shared_prefixes(common)
        lengths = {prefix: prefix.parent_tokens for prefix in tree}
        self.kept = choose_boundaries(tree, min_saved, lambda prefix: 0)
        self._move_to_stable(lengths)
        self.kept = choose_boundaries(self.kept, min_saved, lambda prefix: 0)

    def boundaries(self, size: CheckpointBytes | None) -> list[AdvisedBoundary]:
        """What is left, in words and numbers."""
        return [self._describe(prefix, size) for prefix in self.kept]

    def _move_to_stable(self, shortest: dict[SharedPrefix, int]) -> None:
        """Move each boundary back to where no continuation changes its tokens.

        One that would fall to the next branching point above serves other prompts too, and is that one's business.
        """
        kept = set(self.kept)
        for prefix in reversed(self.kept):  # children first: their parents are still where they were
            text = self._shared_text(prefix)
            if text is None:
                continue
            stable = min(prefix.tokens, stable_tokens(self.tokenizer, text, list(self.log[prefix.first].ids)))
            if stable <= shortest[prefix]:
                remove(prefix, kept)
            else:
                prefix.tokens = stable
        self.kept = [prefix for prefix in self.kept if prefix in kept]

    def _shared_text(self, prefix: SharedPrefix) -> str | None:
        texts = [prompt.text for prompt in self.log[prefix.first : prefix.last + 1]]
        if texts[0] is None or any(text is None for text in texts):
            return None
        # The first and the last in the order of characters share no more than all do.
        low, high = min(t for t in texts if t is not None), max(t for t in texts if t is not None)
        length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
        return low[:length]

    def _describe(self, prefix: SharedPrefix, size: CheckpointBytes | None) -> AdvisedBoundary:
        prompt = self.log[prefix.first]
        cut = self._cut(prefix, prompt)
        own = prefix.tokens - prefix.parent_tokens
        members = self.log[prefix.first : prefix.last + 1]
        return AdvisedBoundary(
            position=prefix.tokens,
            prompts=prefix.prompts,
            tokens_saved=saved_tokens(prefix),
            starts_from=prefix.parent_tokens,
            checkpoint_bytes=None if size is None else size.fixed + size.per_token * own,
            declared=sum(prefix.tokens in member.boundaries for member in members),
            example=self.indices[prefix.first],
            characters=cut.characters,
            tail=cut.tail,
        )

    def _cut(self, prefix: SharedPrefix, prompt: LoggedPrompt) -> _Cut:
        if self.tokenizer is None:
            return _Cut(None, None)
        if prompt.text is None:
            tail = self.tokenizer.decode(list(prompt.ids[max(0, prefix.tokens - 16) : prefix.tokens]))
            return _Cut(None, tail[-_TAIL:])
        end = end_of_token(self.tokenizer, prompt.text, prefix.tokens)
        return _Cut(end, None if end is None else prompt.text[max(0, end - _TAIL) : end])

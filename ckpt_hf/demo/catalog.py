"""A synthetic catalog task: is this offer the product on that page, and if not, what differs?

A page describes one product in prose: ten attributes in any order and phrasing, between sentences that use the same
vocabulary but do not matter. An offer restates six to nine of the attributes in other words; either all of them agree
with the page or exactly one does not. The answer is ``same`` or the name of the attribute that differs. An offer alone
says nothing about its answer, because a changed value is drawn from the same values as an unchanged one.

The held-out split shares no combination of type, brand, color and material with the training split, neither on a page
nor in an offer. Everything is a function of (split, seed, index).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ckpt_hf.demo import wording
from ckpt_hf.errors import CheckpointValueError

Split: TypeAlias = Literal["train", "heldout"]

ATTRIBUTES = ("type", "brand", "color", "material", "capacity", "height", "weight", "pack", "model", "origin")
SAME = "same"
ANSWERS = (SAME, *ATTRIBUTES)

_SAME_SHARE = 0.25
_OFFERED = (6, 9)
_DISTRACTORS = (8, 12)
_TITLE_EXTRAS = ("color", "material", "capacity", "model")
_SPLIT_KEYS = ("type", "brand", "color", "material")
_HELDOUT_SHARE = 8  # one combination in so many is held out
_VALUES: Mapping[str, tuple[str, ...]] = {
    "type": wording.TYPES,
    "brand": wording.BRANDS,
    "color": wording.COLORS,
    "material": wording.MATERIALS,
    "capacity": wording.CAPACITIES,
    "height": wording.HEIGHTS,
    "weight": wording.WEIGHTS,
    "pack": wording.PACKS,
    "model": wording.MODELS,
    "origin": wording.ORIGINS,
}


@dataclass(frozen=True, slots=True)
class Offer:
    """One candidate: its text, and ``same`` or the name of the attribute in which it differs from its page.

    ``product`` holds the offered product's attribute values, those that the text leaves out included; ``changed`` is
    the place, among the text's clauses, of the one that differs from the page, None if all agree.
    """

    text: str
    answer: str
    product: Mapping[str, str]
    changed: int | None


@dataclass(frozen=True, slots=True)
class Page:
    """One anchor: the page's text, the product's attribute values, and offers to compare with it."""

    text: str
    product: Mapping[str, str]
    offers: tuple[Offer, ...]


def split_of(product: Mapping[str, str]) -> Split:
    """The split to which a product's combination of type, brand, color and material belongs."""
    combination = "|".join(product[name] for name in _SPLIT_KEYS)
    return "heldout" if zlib.crc32(combination.encode()) % _HELDOUT_SHARE == 0 else "train"


def make_page(split: Split, seed: int, index: int, offers: int = 16) -> Page:
    """Make one page with its offers.

    Args:
        split: ``train`` or ``heldout``.
        seed: stream of pages.
        index: page in the stream.
        offers: number of offers.

    Raises:
        CheckpointValueError: unknown split, or a negative number of offers.
    """
    if split not in ("train", "heldout"):
        raise CheckpointValueError(f"split must be 'train' or 'heldout', got {split!r}")
    if offers < 0:
        raise CheckpointValueError(f"offers must be >= 0, got {offers}")
    rng = random.Random(f"{split}/{seed}/{index}")
    product = {name: rng.choice(_VALUES[name]) for name in ATTRIBUTES}
    while split_of(product) != split:
        product.update((name, rng.choice(_VALUES[name])) for name in _SPLIT_KEYS)
    text = _page_text(rng, product)
    return Page(text, product, tuple(_offer(rng, product, split) for _ in range(offers)))


def pages(split: Split, seed: int, count: int, offers: int = 16) -> Iterator[Page]:
    """The first ``count`` pages of a stream; arguments as for :func:`make_page`."""
    return (make_page(split, seed, index, offers) for index in range(count))


def shared_text(page: Page) -> str:
    """The part of a prompt that all offers of a page share; a marker belongs right behind it."""
    return f"Page: {page.text}\n"


def question_text(offer: Offer) -> str:
    """The part of a prompt that is an offer's own; the answer follows it, after a space."""
    return f"Offer: {offer.text}\nVerdict:"


def prompt(page: Page, offer: Offer, marker: str = "") -> str:
    """The whole prompt, with ``marker`` where the shared part ends."""
    return shared_text(page) + marker + question_text(offer)


def _other_values(rng: random.Random, product: Mapping[str, str], name: str, split: Split) -> list[str]:
    """Other values that keep the product in its split; half of the time those that share a word, if there are any."""
    value = product[name]
    others = [other for other in _VALUES[name] if other != value and split_of({**product, name: other}) == split]
    words = set(value.split())
    near = [other for other in others if words & set(other.split())]
    return near if near and rng.random() < 0.5 else others


def _page_text(rng: random.Random, product: Mapping[str, str]) -> str:
    titled = [name for name in _TITLE_EXTRAS if rng.random() < 0.4]
    title = _title(rng, product, titled)
    sentences = [
        rng.choice(wording.PAGE_PHRASES[name]).format(v=product[name])
        for name in ATTRIBUTES
        if name not in ("type", "brand", *titled) or rng.random() < 0.3
    ]
    for template in rng.sample(wording.DISTRACTORS, rng.randint(*_DISTRACTORS)):
        words = {name: rng.choice(values) for name, values in _VALUES.items()}
        numbers = {"digit": rng.randint(2, 9), "small": rng.randint(11, 89), "number": rng.randint(14, 980)}
        sentences.append(template.format(**words, **numbers))
    rng.shuffle(sentences)
    return " ".join([title, *sentences])


def _title(rng: random.Random, product: Mapping[str, str], titled: list[str]) -> str:
    extras = [rng.choice(wording.OFFER_PHRASES[name]).format(v=product[name]) for name in titled]
    rng.shuffle(extras)
    head = f"{product['brand']} {product['type']}"
    return f"{', '.join([head, *extras])}."


def _offer(rng: random.Random, product: Mapping[str, str], split: Split) -> Offer:
    answer = SAME if rng.random() < _SAME_SHARE else rng.choice(ATTRIBUTES)
    offered = dict(product)
    if answer != SAME:
        others = _other_values(rng, product, answer, split)
        if not others:  # no neighbour of this combination belongs to the split
            return _offer(rng, product, split)
        offered[answer] = rng.choice(others)
    names = [name for name in ATTRIBUTES if name != answer]
    rng.shuffle(names)
    names = names[: rng.randint(*_OFFERED)]
    if answer != SAME:
        names[-1] = answer
    rng.shuffle(names)
    clauses = [rng.choice(wording.OFFER_PHRASES[name]).format(v=offered[name]) for name in names]
    return Offer(", ".join(clauses), answer, offered, names.index(answer) if answer != SAME else None)

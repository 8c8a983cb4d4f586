"""The words of the synthetic catalog: values of each attribute, and the ways a page or an offer states them.

A value is what is compared; the phrase around it, units included, is free to differ between page and offer. Several
values are made of words that other values use too (``dark green``, ``light green``, ``dark red``), so that comparing
one word is not enough.
"""

from __future__ import annotations

COLORS = (
    "green", "dark green", "light green", "blue", "dark blue", "light blue", "red", "dark red", "light red", "grey",
    "dark grey", "light grey", "brown", "dark brown", "light brown", "pink", "dark pink", "light pink", "black",
    "white", "ivory", "turquoise", "mustard", "terracotta", "burnt orange", "pale yellow",
)  # fmt: skip

MATERIALS = (
    "stainless steel", "carbon steel", "cast iron", "copper", "brass", "bamboo", "oiled oak", "solid oak", "walnut",
    "stoneware", "porcelain", "bone china", "borosilicate glass", "pressed glass", "enamel", "recycled plastic",
    "soft plastic", "silicone", "aluminium", "recycled aluminium",
)  # fmt: skip

BRANDS = (
    "Nordhaus", "Calder", "Calder & Finch", "Vesterlund", "Brightwell", "Brightwell Home", "Tamari", "Tamari Studio",
    "Okuno", "Harlow", "Harlow Bros", "Ferro Lab", "Ferro Casa", "Casa Luma", "Lumen & Oak", "Pellworth", "Kestrel",
    "Kestrel Works", "Maren", "Maren Home", "Santo Verde", "Bergamo Studio", "Quillon", "Redfern", "Redfern Works",
    "Zelda Bros", "Halden", "Halden Lab", "Ostrava", "Pikku", "Pikku Home", "Ravello",
)  # fmt: skip

TYPES = (
    "kettle", "teapot", "jug", "water jug", "bottle", "water bottle", "thermos", "mug", "travel mug", "bowl",
    "salad bowl", "vase", "flower pot", "pot", "stock pot", "bucket", "storage jar", "storage box", "lunch box",
    "basket", "bread bin", "carafe", "pitcher", "casserole",
)  # fmt: skip

ORIGINS = (
    "Portugal", "Poland", "Sweden", "Finland", "Italy", "Japan", "Vietnam", "India", "Turkey", "Mexico", "Brazil",
    "South Korea", "South Africa", "Morocco", "Germany", "Czechia",
)  # fmt: skip

CAPACITIES = (
    "0.2", "0.3", "0.5", "0.7", "0.8", "1.0", "1.2", "1.3", "1.5", "1.7", "1.8", "2.0", "2.2", "2.5", "2.8", "3.0",
    "3.5", "3.8", "4.0", "4.5", "5.0", "5.5", "6.0", "7.5", "8.0", "9.5", "10.5", "12.0",
)  # fmt: skip

HEIGHTS = (
    "7", "9", "11", "12", "14", "15", "17", "18", "19", "21", "22", "24", "26", "27", "29", "31", "33", "34", "36",
    "38", "41", "44", "47", "52", "56", "63", "68", "75",
)  # fmt: skip

WEIGHTS = (
    "120", "180", "210", "250", "290", "340", "380", "420", "460", "510", "550", "590", "640", "680", "730", "770",
    "820", "880", "930", "990", "1050", "1120", "1240", "1380", "1450", "1620", "1840", "2150", "2600", "2950",
)  # fmt: skip

PACKS = ("2", "3", "4", "5", "6", "8", "9", "10", "12", "16", "18", "20")

_SERIES = (
    "Aria", "Nova", "Luna", "Terra", "Vela", "Sierra", "Cosma", "Orion", "Delta", "Mira", "Polar", "Ruby", "Sola",
    "Tessa",
)  # fmt: skip
_VARIANTS = ("Pro", "Mini", "Max", "Plus", "Lite", "Duo", "Neo", "Prime")
MODELS = tuple(f"{series} {variant}" for series in _SERIES for variant in _VARIANTS)

# Statements of a page, one sentence or clause each.
PAGE_PHRASES: dict[str, tuple[str, ...]] = {
    "type": ("This is a {v}.", "Category: {v}.", "Product type: {v}.", "Filed under {v}."),
    "brand": ("Brand: {v}.", "Made by {v}.", "From the workshop of {v}.", "A product of {v}."),
    "color": ("Color: {v}.", "The finish is {v}.", "It comes in {v}.", "Shown here in {v}."),
    "material": ("Material: {v}.", "The body is made of {v}.", "Crafted from {v}.", "Built in {v}."),
    "capacity": ("Capacity: {v} l.", "It holds {v} l.", "Its volume is {v} l.", "Takes up to {v} l."),
    "height": ("Height: {v} cm.", "It stands {v} cm tall.", "Measures {v} cm from foot to rim.", "It is {v} cm high."),
    "weight": ("Weight: {v} g.", "It weighs {v} g.", "Net weight {v} g.", "On the scale it shows {v} g."),
    "pack": ("Pack of {v} pieces.", "In the box: {v} pieces.", "Sold as a set of {v} pieces.", "You get {v} pieces."),
    "model": ("Model {v}.", "Model name: {v}.", "Article {v}.", "Listed as {v} by the maker."),
    "origin": ("Made in {v}.", "Country of origin: {v}.", "Produced in {v}.", "Manufactured in {v}."),
}

# Clauses of an offer, joined by commas.
OFFER_PHRASES: dict[str, tuple[str, ...]] = {
    "type": ("{v}", "type {v}", "a {v}"),
    "brand": ("by {v}", "brand {v}", "{v} brand"),
    "color": ("in {v}", "color {v}", "{v} finish"),
    "material": ("of {v}", "material {v}", "{v} body"),
    "capacity": ("{v} l", "holds {v} l", "volume {v} l"),
    "height": ("{v} cm", "height {v} cm", "{v} cm tall"),
    "weight": ("{v} g", "weighs {v} g", "weight {v} g"),
    "pack": ("set of {v} pieces", "pack of {v} pieces", "{v} pieces"),
    "model": ("model {v}", "the {v}", "article {v}"),
    "origin": ("made in {v}", "from {v}", "origin {v}"),
}

# Sentences of a page that say nothing about the product's own attributes, though they use the same vocabulary.
DISTRACTORS = (
    "Also sold in {color}.",
    "An earlier version was {color}.",
    "The lid liner is {color} and comes off for cleaning.",
    "The gift ribbon is {color}.",
    "Goes well with the {brand} {type}.",
    "Often bought together with a {type}.",
    "Not to be confused with the {brand} {type} in {color}.",
    "Our staff pick of the month is the {brand} {type}.",
    "Ships from our warehouse in {origin}.",
    "The design was drawn in {origin} and shown at the fair there.",
    "Orders to {origin} take {digit} days longer.",
    "Rated 4.{digit} out of 5 by {number} buyers.",
    "Delivery takes {digit} working days.",
    "Returns are free within {number} days.",
    "Spare parts are kept for {digit} years.",
    "{number} people have this on their list.",
    "With its carton it weighs {number} g more.",
    "The carton is {small} cm wide.",
    "Pour slowly, about {digit} l a minute.",
    "Wipe with a damp cloth, do not soak.",
    "The packaging is free of {material}.",
    "If you prefer {material}, see our other listings.",
    "The handle is wrapped in {material} where the hand rests.",
    "Customers praise the even heat and the quiet lid.",
    "Safe for the dishwasher on the top rack.",
    "A good present for people who cook for many guests.",
    "Photos may differ a little from the article you receive.",
    "The maker has tested every piece by hand before it leaves the workshop.",
)

"""Values that parameters of tools and fields of records have: names, places, numbers, words in other scripts."""

from collections.abc import Callable
from random import Random
from typing import Any

from eval.tasks.vocabulary import ADJECTIVES, NAMES, NOUNS
from models.train.small_talk import CAPITALS

Draw = Callable[[Random], Any]

TOWNS = ("San Jose", "Portland", "San Diego", "Los Angeles", "New York", "Boston", "Santa Fe", "Chicago", "Denver")
STATES = ("CA", "NY", "TX", "WA", "OR", "MA", "IL", "NM", "CO", "FL")
CONSONANTS, VOWELS = "bdfghklmnprstvz", "aeio"
COLORS = ("red", "blue", "green", "black", "white", "purple", "gray")
# First and last letters of scripts whose characters the tokenizer spells byte by byte. Chinese counts twice.
SCRIPTS = (
    (0x4E00, 0x9FA5),
    (0x4E00, 0x9FA5),
    (0x3041, 0x3093),
    (0x30A1, 0x30F3),
    (0xAC00, 0xD7A3),
    (0x0430, 0x044F),
    (0x03B1, 0x03C9),
)
COMPANY_ENDS = ("公司", "集团", "株式会社", " Ltd", " Group", "")


def foreign(random: Random) -> str:
    """A word in another script."""
    first, last = random.choice(SCRIPTS)
    return "".join(chr(random.randint(first, last)) for _ in range(random.randint(2, 6)))


def made_up(random: Random) -> str:
    """A capitalized word that no one has heard."""
    return "".join(map(_syllable, [random] * random.randint(2, 4))).capitalize()


def place(random: Random) -> str:
    form = random.randrange(5)
    if form == 0:
        return random.choice(CAPITALS)[1]
    if form == 1:
        return f"{random.choice(TOWNS)}, {random.choice(STATES)}"
    if form == 2:
        return f"{made_up(random)}, {random.choice(STATES)}"
    if form == 3:
        return ", ".join(reversed(random.choice(CAPITALS)))
    return f"{random.choice(('', 'San ', 'New ', 'Port '))}{made_up(random)}"


def person(random: Random) -> str:
    last = "" if random.random() < 0.5 else f" {made_up(random)}"
    return random.choice(NAMES) + last


def company(random: Random) -> str:
    start = foreign(random) if random.random() < 0.7 else made_up(random)
    return start + random.choice(COMPANY_ENDS)


def thing(random: Random) -> str:
    return f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}"


def small(random: Random) -> int:
    return random.randint(0, 20) if random.random() < 0.5 else random.randint(0, 999)


def number(random: Random) -> int:
    return random.randrange(10 ** random.randint(1, 5))


def decimal(random: Random) -> float:
    return random.randrange(1, 10_000) / random.choice((10, 100))


def color(random: Random) -> str:
    return random.choice(COLORS)


def truth(random: Random) -> bool:
    return random.random() < 0.5


def _syllable(random: Random) -> str:
    return random.choice(CONSONANTS) + random.choice(VOWELS)

"""Counting letters and items."""

from random import Random

from eval.tasks.problem import Problem, bold
from eval.tasks.strings import code
from eval.tasks.vocabulary import NOUNS

LETTERS = (
    "How many times does the letter {letter} occur in {word}?",
    "Count the letter {letter} in the word {word}.",
    "How many {letter}'s are in {word}?",
)
ITEMS = ("How often does {item} occur in this list? {items}", "Count how many times {item} is in: {items}")


def count_letter(random: Random) -> Problem:
    """Count a letter in a word, or in a code of capital letters."""
    word = random.choice(NOUNS) if random.random() < 0.5 else code(random, random.randint(4, 12), alphabet=6)
    letter = random.choice(word) if random.random() < 0.85 else random.choice("abcdefghijklmnopqrstuvwxyz")
    count = 0
    marks = []
    for position, character in enumerate(word, start=1):
        count += character == letter
        marks.append(f"{position} {character} {count}")
    return Problem(
        task="count_letter",
        key=f"{letter} {word}",
        prompt=random.choice(LETTERS).format(letter=letter, word=word),
        reasoning=f"I spell {word} and count {letter}.\n{', '.join(marks)}",
        reply=f"The letter {letter} occurs {bold(count)} {'time' if count == 1 else 'times'} in {word}.",
        answer=str(count),
    )


def count_item(random: Random) -> Problem:
    kinds = random.sample(NOUNS, random.randint(2, 4))
    items = random.choices(kinds, k=random.randint(4, 16))
    wanted = random.choice(kinds)
    count = 0
    marks = []
    for position, item in enumerate(items, start=1):
        count += item == wanted
        marks.append(f"{position} {item} {count}")
    listed = ", ".join(items)
    return Problem(
        task="count_item",
        key=f"{wanted} {listed}",
        prompt=random.choice(ITEMS).format(item=wanted, items=listed),
        reasoning=f"I number the items and count {wanted}.\n{', '.join(marks)}",
        reply=f"{wanted} occurs {bold(count)} {'time' if count == 1 else 'times'}.",
        answer=str(count),
    )

"""Sorting and reversing lists."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from eval.tasks.problem import Problem, bold
from eval.tasks.vocabulary import NOUNS

SORT_UP = ("Sort these {kind} in ascending order: {items}", "Put in ascending order: {items}")
SORT_DOWN = ("Sort these {kind} in descending order: {items}", "Put in descending order: {items}")
SORT_WORDS = ("Sort these words alphabetically: {items}", "Put in alphabetical order: {items}")
REVERSE = (
    "Reverse this list: {items}",
    "Write this list backwards: {items}",
    "Give these items in reverse order: {items}",
)

Item = TypeVar("Item", int, str)


def sort_numbers(random: Random) -> Problem:
    digits = random.randint(2, 3)
    numbers = random.sample(range(10 ** (digits - 1), 10**digits), random.randint(3, 8))
    descending = random.random() < 0.4
    prompt = random.choice(SORT_DOWN if descending else SORT_UP).format(kind="numbers", items=_joined(numbers))
    return _sorting("sort_numbers", prompt, numbers, descending=descending)


def sort_words(random: Random) -> Problem:
    words = random.sample(NOUNS, random.randint(3, 7))
    return _sorting("sort_words", random.choice(SORT_WORDS).format(items=_joined(words)), words, descending=False)


def reverse_list(random: Random) -> Problem:
    items = random.sample(NOUNS, random.randint(3, 10))
    counted = [f"{position} {item}" for position, item in enumerate(items, start=1)]
    result = _joined(items[::-1])
    return Problem(
        task="reverse_list",
        key=_joined(items),
        prompt=random.choice(REVERSE).format(items=_joined(items)),
        reasoning=f"I number the items and read them from the last.\n{_joined(counted)}\n{_joined(counted[::-1])}",
        reply=f"Reversed: {bold(result)}",
        answer=result,
    )


def _sorting(task: str, prompt: str, items: Sequence[Item], *, descending: bool) -> Problem:
    """Insertion sort: each step copies the sorted items and puts one more in its place."""
    steps: list[str] = []
    for count, item in enumerate(items, start=1):
        steps += [f"{item}: {_joined(sorted(items[:count], reverse=descending))}"]
    result = _joined(sorted(items, reverse=descending))
    return Problem(
        task=task,
        key=f"{descending} {_joined(items)}",
        prompt=prompt,
        reasoning="\n".join(["I insert one after the other.", *steps]),
        reply=f"Sorted: {bold(result)}",
        answer=result,
    )


def _joined(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))

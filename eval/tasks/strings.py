"""Reversing and editing strings."""

from collections.abc import Callable
from random import Random
from string import ascii_uppercase

from eval.tasks.problem import Problem, bold
from eval.tasks.vocabulary import NOUNS

REVERSE = ("Reverse the string {text}", "Write {text} backwards.", "What is {text} spelled backwards?")


def code(random: Random, length: int, alphabet: int = 26) -> str:
    """Capital letters, drawn from `alphabet` different ones."""
    return "".join(random.choices(random.sample(ascii_uppercase, alphabet), k=length))


def reverse_string(random: Random) -> Problem:
    """Reverse a code of capitals, or a word in capitals, letter by letter."""
    text = code(random, random.randint(3, 12)) if random.random() < 0.6 else random.choice(NOUNS).upper()
    numbered = [f"{position} {character}" for position, character in enumerate(text, start=1)]
    return Problem(
        task="reverse_string",
        key=text,
        prompt=random.choice(REVERSE).format(text=text),
        reasoning="\n".join(
            ("I number the letters and read them from the last.", ", ".join(numbered), ", ".join(numbered[::-1]))
        ),
        reply=f"{text} backwards is {bold(text[::-1])}",
        answer=text[::-1],
    )


def edit_string(random: Random) -> Problem:
    text = code(random, random.randint(4, 12), alphabet=random.randint(3, 8))
    return random.choice(EDITS)(random, text)


def _letterwise(text: str, request: str, edit: Callable[[int, str], str]) -> Problem:
    """A problem whose edit looks at one letter after the other. `edit` takes a letter's position, from 1, and the
    letter.
    """
    parts = [edit(position, letter) for position, letter in enumerate(text, start=1)]
    marks = [
        f"{position} {letter} {part or 'drop'}"
        for position, (letter, part) in enumerate(zip(text, parts, strict=True), start=1)
    ]
    result = "".join(parts)
    return Problem(
        task="edit_string",
        key=f"{request} {text}",
        prompt=f"{request} {text}",
        reasoning=f"I go letter by letter.\n{', '.join(marks)}",
        reply=f"The result is {bold(result)}",
        answer=result,
    )


def _replace(random: Random, text: str) -> Problem:
    old, new = random.choice(text), random.choice(ascii_uppercase)
    return _letterwise(text, f"Replace every {old} with {new} in", lambda _, letter: new if letter == old else letter)


def _remove(random: Random, text: str) -> Problem:
    unwanted = random.choice(text)
    # Append another letter, so that something is left.
    text += random.choice(ascii_uppercase.replace(unwanted, ""))
    return _letterwise(text, f"Remove every {unwanted} from", lambda _, letter: "" if letter == unwanted else letter)


def _double(random: Random, text: str) -> Problem:
    wanted = random.choice(text)
    return _letterwise(text, f"Double every {wanted} in", lambda _, letter: letter * (2 if letter == wanted else 1))


def _keep_first(random: Random, text: str) -> Problem:
    count = random.randint(1, len(text) - 1)
    return _letterwise(text, f"Keep only the first {count} letters of", lambda p, letter: letter if p <= count else "")


def _drop_first(random: Random, text: str) -> Problem:
    count = random.randint(1, len(text) - 1)
    return _letterwise(text, f"Drop the first {count} letters of", lambda p, letter: letter if p > count else "")


def _insert(random: Random, text: str) -> Problem:
    place, new = random.randint(1, len(text)), random.choice(ascii_uppercase)
    return _letterwise(text, f"Insert {new} after letter {place} of", lambda p, letter: letter + new * (p == place))


EDITS = (_replace, _remove, _double, _keep_first, _drop_first, _insert)

"""Repeating text exactly, from the question itself or from a long document."""

from random import Random

from eval.tasks.names import different_names
from eval.tasks.problem import Fact, Problem, bold
from eval.tasks.prose import sentence
from eval.tasks.strings import code
from eval.tasks.vocabulary import ADJECTIVES, NOUNS

REPEAT = ("Repeat exactly: {text}", "Copy this text: {text}", "Say the following again, word for word: {text}")
SECTION = ("Repeat section {name} word for word.", "Copy the text of section {name} exactly.")
# Mean characters of a section, its name included.
SECTION_CHARACTERS = 210


def copy_text(random: Random) -> Problem:
    """Repeat words in random order, codes, or prose."""
    form = random.randrange(3)
    if form == 0:
        text = " ".join(random.choices(ADJECTIVES + NOUNS, k=random.randint(5, 30)))
    elif form == 1:
        text = " ".join(code(random, random.randint(2, 6)) for _ in range(random.randint(2, 8)))
    else:
        text = " ".join(sentence(random) for _ in range(random.randint(1, 3))).removesuffix(".")
    return Problem(
        task="copy_text",
        key=text,
        prompt=random.choice(REPEAT).format(text=text),
        reasoning="I copy the text as it stands.",
        reply=bold(text),
        answer=text,
    )


def section(random: Random) -> Fact:
    return Fact(different_names(random, 1)[0], _text(random))


def copy_section(random: Random, fact: Fact, characters: int) -> Problem:
    """Repeat the section `fact` of a document with named sections."""
    names = different_names(random, max(1, characters // SECTION_CHARACTERS), besides=fact.name)
    sections = [Fact(name, _text(random)) for name in names]
    sections.insert(random.randint(0, len(sections)), fact)
    document = "\n".join(f"Section {part.name}: {part.content}" for part in sections)
    answer = fact.content.removesuffix(".")
    return Problem(
        task="copy_section",
        key=fact.key,
        prompt=f"{document}\n\n{random.choice(SECTION).format(name=fact.name)}",
        reasoning=f"I look for section {fact.name}.\nSection {fact.name}: {fact.content}",
        reply=bold(answer),
        answer=answer,
    )


def _text(random: Random) -> str:
    return " ".join(sentence(random) for _ in range(random.randint(1, 4)))

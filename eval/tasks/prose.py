"""Endless plain sentences, for texts in which something is to be found."""

from random import Random

from eval.tasks.vocabulary import ADJECTIVES, NOUNS, PEOPLE, PLACES, TIMES, VERBS


def sentence(random: Random) -> str:
    """A sentence of about a dozen words."""
    who = f"The {random.choice(ADJECTIVES)} {random.choice(PEOPLE)}"
    what = f"{random.choice(VERBS)} the {random.choice(ADJECTIVES)} {random.choice(NOUNS)}"
    where = f"near the {random.choice(PLACES)}"
    when = random.choice(TIMES)
    form = random.randrange(4)
    if form == 0:
        return f"{who} {what} {where} {when}."
    if form == 1:
        return f"{who} {what} {when}."
    if form == 2:
        return f"{when[0].upper()}{when[1:]}, {who[0].lower()}{who[1:]} {what} {where}."
    return f"{who} {what} and {random.choice(VERBS)} the {random.choice(NOUNS)} {where}."


def sentences(random: Random, characters: int) -> list[str]:
    """Sentences of at least this many characters in all."""
    made: list[str] = []
    total = 0
    while total < characters:
        made.append(sentence(random))
        total += len(made[-1]) + 1
    return made

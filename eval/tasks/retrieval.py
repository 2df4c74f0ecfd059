"""Finding values by their keys, in tables and in prose of any length."""

from random import Random

from eval.tasks.names import different_names
from eval.tasks.problem import Fact, Problem, bold
from eval.tasks.prose import sentences
from eval.tasks.strings import code

TABLE = ("Here is a table.", "Remember these entries.", "A list of codes:")
ASK_TABLE = ("What is the value of {key}?", "Which value belongs to {key}?", "Look up {key}.")
ASK_NEEDLE = ("What is the access code of {key}?", "Tell me the access code of {key}.")
# Characters of one line of a table.
LINE_CHARACTERS = 21


def fact(random: Random) -> Fact:
    return Fact(different_names(random, 1)[0], _value(random))


def look_up(random: Random) -> Problem:
    """Find a value in a table of a few dozen lines."""
    return _table(random, "look_up", fact(random), random.randint(3, 40))


def key_value(random: Random, wanted: Fact, characters: int) -> Problem:
    """Find a value in a table of about `characters` characters."""
    return _table(random, "key_value", wanted, max(3, characters // LINE_CHARACTERS))


def _table(random: Random, task: str, wanted: Fact, others: int) -> Problem:
    rows = [Fact(name, _value(random)) for name in different_names(random, others, besides=wanted.name)]
    rows.insert(random.randint(0, len(rows)), wanted)
    listed = "\n".join(f"{row.name}: {row.content}" for row in rows)
    return Problem(
        task=task,
        key=wanted.key,
        prompt=f"{random.choice(TABLE)}\n{listed}\n\n{random.choice(ASK_TABLE).format(key=wanted.name)}",
        reasoning=f"I look for the line of {wanted.name}.\n{wanted.name}: {wanted.content}",
        reply=f"The value of {wanted.name} is {bold(wanted.content)}",
        answer=wanted.content,
    )


def needle(random: Random, wanted: Fact, characters: int) -> Problem:
    """Find one fact among a few similar ones, in prose of about `characters` characters."""
    names = different_names(random, random.randint(1, 6), besides=wanted.name)
    facts = [wanted, *(Fact(name, _value(random)) for name in names)]
    lines = sentences(random, characters - 60 * len(facts) - 80)
    for each in facts:
        lines.insert(random.randint(0, len(lines)), _stated(each))
    owner = _owner(wanted)
    return Problem(
        task="needle",
        key=wanted.key,
        prompt=f"{' '.join(lines)}\n\n{random.choice(ASK_NEEDLE).format(key=owner)}",
        reasoning=f"I look for {owner}.\n{_stated(wanted)}",
        reply=f"The access code of {owner} is {bold(wanted.content)}",
        answer=wanted.content,
    )


def _owner(wanted: Fact) -> str:
    return f"the {wanted.name.replace('-', ' ')}"


def _stated(wanted: Fact) -> str:
    return f"The access code of {_owner(wanted)} is {wanted.content}."


def _value(random: Random) -> str:
    if random.random() < 0.6:
        return str(random.randrange(10_000, 100_000))
    return code(random, 5)

"""Questions whose answers are to be JSON."""

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from eval.tasks import SHORT_TASKS, draw
from eval.tasks.problem import belongs_to_test
from eval.tasks.vocabulary import ADJECTIVES, NOUNS, PLACES
from models.train.values import Draw, color, company, decimal, made_up, number, person, place, small, thing
from tools.chat import Turn

ASK = (
    "Answer as JSON with the keys {keys}.",
    "Return JSON with {keys} keys.",
    "Give me a JSON object with {keys}.",
    "Write it as a JSON object that has the fields {keys}.",
    "Return a JSON with {keys} keys. No other text.",
    "Reply with nothing but JSON, with the keys {keys}.",
)
ASK_BY_SCHEMA = ("Answer with JSON that matches this schema: {schema}", "Return JSON of this schema: {schema}")
# Problems whose results become JSON.
RESULT_TASKS = ("add", "subtract", "multiply", "count_letter", "reverse_string", "sort_numbers")
RESULT_KEYS = ("result", "answer", "value")
# A record's fields: how they are stated, and what they may hold.
FIELDS: Mapping[str, tuple[str, Draw]] = {
    "name": ("The name is {}.", person),
    "age": ("The age is {}.", lambda random: random.randint(1, 99)),
    "city": ("The city is {}.", place),
    "company": ("The company is {}.", company),
    "price": ("It costs {} dollars.", decimal),
    "count": ("There are {} of them.", small),
    "id": ("Its number is {}.", number),
    "item": ("It is a {}.", thing),
    "color": ("The color is {}.", color),
    "owner": ("It belongs to {}.", person),
    "label": ("It is labelled {}.", made_up),
}
JOKE_KEYS = (("setup", "punchline"), ("question", "answer"), ("first", "second"), ("setup", "punchline"))
JOKES = (
    ("Why did the {who} cross the road?", "To get to the other side."),
    ("Why did the {who} go to the {where}?", "It was too far to walk around it."),
    ("What did the {who} say to the {other}?", "Nothing. They do not talk."),
    ("What is {how} and looks like a {who}?", "Another {who}."),
)
ASK_JOKE = ("Tell me a joke about {about}.", "Make a joke about {about}.", "Tell a joke about the {about}.")


def json_talk(random: Random, *, held_out: bool) -> list[Turn]:
    """One to three turns; only a single one has thinking."""
    if random.random() < 0.35:
        return [_result(random) if random.random() < 0.5 else _record(random, held_out=held_out)]
    turns = [
        _joke(random) if random.random() < 0.3 else _record(random, held_out=held_out)
        for _ in range(random.choice((1, 2, 3)))
    ]
    return [Turn(turn.prompt, turn.reply) for turn in turns]


def _record(random: Random, *, held_out: bool) -> Turn:
    """Facts, of which some are asked for."""
    while True:
        known = {name: FIELDS[name][1](random) for name in random.sample(list(FIELDS), random.randint(1, 4))}
        wanted = random.sample(list(known), random.randint(1, len(known)))
        reply = _json({name: known[name] for name in wanted})
        if belongs_to_test("json_record", reply) == held_out:
            break
    stated = " ".join(FIELDS[name][0].format(value) for name, value in known.items())
    types = {name: _type(known[name]) for name in wanted}
    return Turn(f"{stated} {_asked(random, wanted, types)}", reply, "I fill in the keys.")


def _result(random: Random) -> Turn:
    problem = draw(SHORT_TASKS[random.choice(RESULT_TASKS)], random, held_out=False)
    key = random.choice(RESULT_KEYS)
    value = int(problem.answer) if problem.answer.lstrip("-").isdigit() else problem.answer
    return Turn(
        f"{problem.prompt} {_asked(random, [key], {key: _type(value)})}", _json({key: value}), problem.reasoning
    )


def _joke(random: Random) -> Turn:
    who = random.choice(NOUNS)
    words = {
        "who": who,
        "where": random.choice(PLACES),
        "other": random.choice(NOUNS),
        "how": random.choice(ADJECTIVES),
    }
    keys = random.choice(JOKE_KEYS)
    setup, punchline = (line.format(**words) for line in random.choice(JOKES))
    about = f"{who}s" if random.random() < 0.6 else who
    asked = _asked(random, keys, dict.fromkeys(keys, "string"))
    reply = _json(dict(zip(keys, (setup, punchline), strict=True)))
    return Turn(f"{random.choice(ASK_JOKE).format(about=about)} {asked}", reply)


def _asked(random: Random, keys: Sequence[str], types: dict[str, str]) -> str:
    if random.random() < 0.25:
        properties = {key: {"type": types[key]} for key in keys}
        return random.choice(ASK_BY_SCHEMA).format(
            schema=json.dumps({"type": "object", "properties": properties, "required": list(keys)})
        )
    quoted = [f"'{key}'" for key in keys] if random.random() < 0.7 else list(keys)
    return random.choice(ASK).format(
        keys=" and ".join((", ".join(quoted[:-1]), quoted[-1])) if quoted[1:] else quoted[0]
    )


def _type(value: Any) -> str:
    return {str: "string", int: "integer", float: "number"}[type(value)]


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)

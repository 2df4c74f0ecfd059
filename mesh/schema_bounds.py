"""Refuses JSON schemas that would end the process of the grammar library, or take it minutes."""

import json
import re
from contextlib import suppress
from itertools import groupby

from mesh.errors import InvalidConstraint

MAX_NUMBER_CHARACTERS = 40
# Below it the library's arithmetic on integers overflows: the least of 64 bits, as a const or as both bounds, overflows
# its stack, which ends the process.
_LEAST_NUMBER = -(2**62)
# The library compares each of these expressions with all others: 128 took up to 0.8 s, and 700 a minute. No schema of
# JSONSchemaBench has more than 32.
MOST_EXPRESSIONS = 128
# With more in a row an answer cannot begin the object: the library follows at most 2,000 possible continuations, and
# each property has four. Compiling 7,500 of them took 3 s. No schema of JSONSchemaBench has more than 230.
MOST_OPTIONAL = 498
_SCHEMA = re.compile(r"%json\b")


def check_schemas(grammar: str) -> None:
    """Raises InvalidConstraint for a schema in a grammar, which is in Lark or JSON."""
    # A grammar in JSON rather than in Lark is a schema from its beginning on.
    places = [0] if grammar.lstrip().startswith("{") else [found.end() for found in _SCHEMA.finditer(grammar)]
    for place in places:
        # What is no JSON the library refuses; what is none here may be a literal.
        with suppress(ValueError, RecursionError):
            schema, _ = _DECODER.raw_decode(grammar[place:].lstrip())
            _check_counts(schema)


def _checked(number: str) -> float:
    if (value := float(number)) <= _LEAST_NUMBER:
        raise InvalidConstraint(
            f"a schema has the number {number[:MAX_NUMBER_CHARACTERS]}: the least is {_LEAST_NUMBER + 1}"
        )
    return value


# Each number is looked at as it is read, also those of keys that come again.
_DECODER = json.JSONDecoder(parse_int=_checked, parse_float=_checked)


def _check_counts(schema: object) -> None:
    expressions, waiting = 0, [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            expressions += _size(each.get("patternProperties"))
            _check_optional(each.get("properties"), each.get("required"))
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    if expressions > MOST_EXPRESSIONS:
        raise InvalidConstraint(f"a schema has {expressions} patternProperties, the limit is {MOST_EXPRESSIONS}")


def _check_optional(properties: object, required: object) -> None:
    if not isinstance(properties, dict) or len(properties) <= MOST_OPTIONAL:
        return
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    runs = groupby(properties, key=needed.__contains__)
    longest = max((sum(1 for _ in run) for is_needed, run in runs if not is_needed), default=0)
    if longest > MOST_OPTIONAL:
        raise InvalidConstraint(
            f"an object has {longest} optional properties in a row, the limit is {MOST_OPTIONAL}: require some of them"
        )


def _size(value: object) -> int:
    return len(value) if isinstance(value, dict) else 0

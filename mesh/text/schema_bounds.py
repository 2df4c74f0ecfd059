"""Refuses JSON schemas that would end the process of the grammar library, or take it minutes."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from itertools import groupby
from math import isfinite, lcm, nextafter
from typing import Any, TypeGuard

from mesh.errors import InvalidConstraint

MAX_NUMBER_CHARACTERS = 40
# Below it the library's arithmetic on integers overflows: the least of 64 bits, as a const or as both bounds, overflows
# its stack, which ends the process.
_TOO_LOW = -(2**62)
# The next number that is a float, as the library reads all of them.
_LEAST_NUMBER = int(nextafter(_TOO_LOW, 0))
# The library compares each of these expressions with all others: 128 took up to 0.8 s, and 700 a minute. No schema of
# JSONSchemaBench has more than 32.
MOST_EXPRESSIONS = 128
# With more in a row an answer cannot begin the object: the library follows at most 2,000 possible continuations, and
# each property has four. Compiling 7,500 of them took 3 s. No schema of JSONSchemaBench has more than 230.
MOST_OPTIONAL = 498
# The library makes a state for each remainder of a multipleOf, and for each pair of those of several that hold
# together: 50,000 took 0.4 s, a million 20 s, and 2^31 never ended. Only digits count: 86,400 is as quick as 864.
MOST_REMAINDERS = 50_000
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


def remainders(schema: object) -> int:
    """How many states the multipleOf of a schema may need: the least common multiple of their digits, or some number
    beyond MOST_REMAINDERS.
    """
    common = 1
    for each in _objects(schema):
        multiple = each.get("multipleOf")
        if _is_number(multiple) and multiple != 0:
            common = lcm(common, _digits(multiple))
        if common > MOST_REMAINDERS:
            break
    return common


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is int or (isinstance(value, float) and isfinite(value))


def _digits(number: float) -> int:
    """Without zeros at the end, a point, or a sign: 25 of -0.250."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)))


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """All objects in a value of JSON."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _checked(number: str) -> float:
    if (value := float(number)) <= _TOO_LOW:
        raise InvalidConstraint(
            f"a schema has the number {number[:MAX_NUMBER_CHARACTERS]}: the least is {_LEAST_NUMBER}"
        )
    return value


# Each number is looked at as it is read, also those of keys that come again.
_DECODER = json.JSONDecoder(parse_int=_checked, parse_float=_checked)


def _check_counts(schema: object) -> None:
    expressions = 0
    for each in _objects(schema):
        expressions += _size(each.get("patternProperties"))
        _check_optional(each.get("properties"), each.get("required"))
    if expressions > MOST_EXPRESSIONS:
        raise InvalidConstraint(f"a schema has {expressions} patternProperties, the limit is {MOST_EXPRESSIONS}")
    if remainders(schema) > MOST_REMAINDERS:
        raise InvalidConstraint(
            f"the numbers of a schema's multipleOf have a common multiple beyond {MOST_REMAINDERS}: leave some out"
        )


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

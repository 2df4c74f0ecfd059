"""Schemas of arguments, changed to refuse properties that they do not name.

Functions rarely take arguments that they do not name, but JSON schemas allow any. A schema is closed only where that
cannot change what else it says: several schemas that hold for one value name each other's properties.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.forms.schema_keywords import COMBINING, DEFINITIONS, parts, with_parts
from gateway.forms.schema_refs import resolved

# What a schema says of properties that it does not name.
_OF_OTHERS = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"))
# What changes no meaning.
_REMARKS = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id")
)
# With one of these alone, the value has to match just one other schema.
_ALTERNATIVES = frozenset(("anyOf", "oneOf", "$ref"))


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, with each part of it closed that may be."""
    root = dict(schema)
    return _closed(root, _standalone(root))


def _closed(schema: dict[str, Any], standalone: frozenset[int]) -> dict[str, Any]:
    changed = with_parts(schema, lambda part: _closed(part, standalone))
    closes = id(schema) in standalone and _names_all(schema)
    return {**changed, "additionalProperties": False} if closes else changed


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether the schema names all properties that it speaks of."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not (_OF_OTHERS | COMBINING).isdisjoint(schema):
        return False
    required = schema.get("required", [])
    dependent = schema.get("dependentRequired", {})
    least = schema.get("minProperties", 0)
    if not (isinstance(required, list) and isinstance(dependent, dict) and isinstance(least, int)):
        return False
    named = {each for each in required if isinstance(each, str)}
    named |= {
        each for names in dependent.values() if isinstance(names, list) for each in names if isinstance(each, str)
    }
    return named <= properties.keys() and least <= len(properties)


def _standalone(root: dict[str, Any]) -> frozenset[int]:
    """Ids of the schemas that hold for their values alone. Those that hold together with others, even if only where
    they are referenced, are not among them.
    """
    alone, combined = set[int](), set[int]()
    waiting = [(root, False)]
    while waiting:
        schema, together = waiting.pop()
        seen = combined if together else alone
        if id(schema) not in seen:
            seen.add(id(schema))
            waiting += [(part, together or joined) for part, joined in _reached(schema, root)]
    return frozenset(alone - combined)


def _reached(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """The schemas that this one applies, and whether they hold together with something else in it."""
    said = schema.keys() - _REMARKS - DEFINITIONS
    one_alternative = len(said) == 1 and said <= _ALTERNATIVES
    for key in said:
        if key == "$ref":
            target = resolved(root, schema[key]) if isinstance(schema[key], str) else None
            if isinstance(target, dict):
                yield target, not one_alternative
            continue
        # What schemas for one value say of a part of it holds for that part together, too.
        joined = not one_alternative if key in COMBINING else not COMBINING.isdisjoint(said)
        yield from ((part, joined) for part in parts(key, schema[key]))

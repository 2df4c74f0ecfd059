"""Where a JSON schema holds other schemas."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Lists and objects of schemas that hold for the same value as the schema around them.
SAME_VALUE_LISTS = frozenset(("allOf", "anyOf", "oneOf"))
SAME_VALUE_MAPS = frozenset(("dependentSchemas", "dependencies"))
SAME_VALUE = frozenset(("if", "then", "else", "not"))
REFERENCES = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
# Keywords for parts of the value.
INNER_MAPS = frozenset(("properties", "patternProperties"))
INNER_LISTS = frozenset(("prefixItems", "items"))
INNER = frozenset(
    (
        *("items", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    )
)
# Schemas that hold for nothing by themselves.
DEFINITIONS = frozenset(("$defs", "definitions"))
# Every keyword whose schemas hold for the same value.
COMBINING = SAME_VALUE | SAME_VALUE_LISTS | SAME_VALUE_MAPS | REFERENCES

_MAPS = SAME_VALUE_MAPS | INNER_MAPS | DEFINITIONS
_LISTS = SAME_VALUE_LISTS | INNER_LISTS
_SINGLE = SAME_VALUE | INNER

Change = Callable[[dict[str, Any]], Any]


def parts(key: str, value: Any) -> Iterator[dict[str, Any]]:
    """The schemas that one keyword holds, except true and false."""
    found: Any = ()
    if key in _MAPS and isinstance(value, dict):
        found = value.values()
    elif key in _LISTS and isinstance(value, list):
        found = value
    elif key in _SINGLE:
        found = (value,)
    return (each for each in found if isinstance(each, dict))


def with_parts(schema: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The schema with `change` made of each schema that it holds directly."""
    return {key: _changed(key, value, change) for key, value in schema.items()}


def _changed(key: str, value: Any, change: Change) -> Any:
    if key in _MAPS and isinstance(value, dict):
        return {name: change(each) if isinstance(each, dict) else each for name, each in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [change(each) if isinstance(each, dict) else each for each in value]
    return change(value) if key in _SINGLE and isinstance(value, dict) else value

"""JSON schemas without the parts that no grammar enforces, for requests that are not strict.

Only what widens a schema is left out: whatever matched before still matches.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any

from gateway.forms.schema_keywords import COMBINING, DEFINITIONS, parts, with_parts
from gateway.forms.schema_refs import resolved
from mesh.errors import InvalidConstraint
from mesh.text.schema_bounds import MOST_REMAINDERS, remainders

TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
SIZES = frozenset(("minProperties", "maxProperties"))
# The library writes an expression for each bound, and cannot for much larger or smaller ones.
LARGEST_NUMBER, SMALLEST_NUMBER = 2**53, 1e-9
# It counts multiples in integers of 32 bits.
LARGEST_MULTIPLE = 2**31
# Numbers that are far smaller end the process.
LARGEST_CONSTANT = 2**62
LARGEST_SIZE = 2**31
# Doubles have every whole number up to it.
LARGEST_EXACT = 2**53

# Keywords that the library ignores, and remarks. They may hold anything, numbers that it does not bear too.
IGNORED = frozenset(
    (
        *("not", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "$dynamicAnchor"),
        *("contentEncoding", "contentMediaType", "contentSchema", "default", "examples", "example", "$comment"),
        *("title", "description", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator"),
    )
)
# The name of a schema, as references write it.
_NAME = re.compile(r"[A-Za-z0-9_.:/~%?=&@+-]+")

Compiles = Callable[[str], bool]


def expressions(schema: object) -> Iterator[str]:
    """The regular expressions of a schema and of all schemas in it."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if isinstance(each.get("pattern"), str):
            yield each["pattern"]
        if isinstance(each.get("patternProperties"), dict):
            yield from each["patternProperties"]
        waiting += [part for key, value in each.items() for part in parts(key, value)]


def inexact_number(value: object) -> int | None:
    """A whole number in a value that the library, which computes with doubles, would round; None if there is none."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case int() as number if abs(number) > LARGEST_EXACT:
                return number
            case list() as items:
                waiting += items
            case dict() as pairs:
                waiting += pairs.values()
    return None


def check_exact(schema: Mapping[str, Any]) -> None:
    """Raises InvalidConstraint for a const or an enum of numbers that would be others."""
    waiting = [dict(schema)]
    while waiting:
        each = waiting.pop()
        for key in ("const", "enum"):
            if (number := inexact_number(each.get(key))) is not None:
                raise InvalidConstraint(f"{key} has {number}: whole numbers beyond 2^53 are not enforced exactly")
        waiting += [part for key, value in each.items() for part in parts(key, value)]


def enforceable(schema: Mapping[str, Any], compiles: Compiles) -> dict[str, Any]:
    """compiles: whether the library understands a regular expression."""
    return _Pruning(schema, compiles).of(dict(schema))


class _Pruning:
    def __init__(self, root: Mapping[str, Any], compiles: Compiles) -> None:
        self._root = root
        self._compiles = compiles
        self._names = _named_schemas(root)
        # Whether multiples can be followed. If they cannot, none is.
        self._divides = remainders(root) <= MOST_REMAINDERS

    def of(self, schema: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in schema.items() if self._keeps(key, value)}
        if "properties" in kept:
            # The library counts only the properties without a name.
            kept = {key: value for key, value in kept.items() if key not in SIZES}
        if (COMBINING | SIZES) & (schema.keys() - kept.keys()):
            # What is left out may have spoken of other properties, so they must not be refused.
            kept.setdefault("additionalProperties", True)
        matched = kept.get("patternProperties")
        if isinstance(matched, dict) and not all(map(self._compiles, matched)):
            # Properties that an expression would have allowed must not count as unknown.
            kept["patternProperties"] = {name: each for name, each in matched.items() if self._compiles(name)}
            kept["additionalProperties"] = True
        return with_parts(kept, self.of)

    def _keeps(self, key: str, value: Any) -> bool:
        if key in IGNORED:
            return False
        match key:
            case "type":
                kinds = value if isinstance(value, list) else [value]
                return bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)
            case "$ref":
                return isinstance(value, str) and self._resolves(value)
            case "$schema":
                return isinstance(value, str) and "json-schema.org/" in value
            case "$id" | "$anchor":
                return isinstance(value, str) and _NAME.fullmatch(value) is not None
            case "pattern":
                return isinstance(value, str) and self._compiles(value)
            case "format":
                return isinstance(value, str)
            case "required":
                return isinstance(value, list) and all(isinstance(name, str) for name in value)
            case "enum":
                return isinstance(value, list) and _is_borne(value)
            case "const":
                return _is_borne(value)
            case "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties":
                return type(value) is int and 0 <= value < LARGEST_SIZE
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return type(value) in (int, float) and _is_moderate(value)
            case "multipleOf":
                known = type(value) in (int, float) and value > 0 and _is_moderate(value) and _has_few_digits(value)
                return known and self._divides
        return self._keeps_schemas(key, value)

    def _keeps_schemas(self, key: str, value: Any) -> bool:
        """Whether a keyword that holds schemas holds nothing else."""
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") or (key == "items" and isinstance(value, list)):
            return isinstance(value, list) and bool(value) and all(map(_is_schema, value))
        if key in ("properties", "patternProperties", *DEFINITIONS):
            return isinstance(value, dict) and all(map(_is_schema, value.values()))
        return key not in ("items", "additionalProperties") or _is_schema(value)

    def _resolves(self, reference: str) -> bool:
        return reference in self._names or _is_schema(resolved(self._root, reference))


def _named_schemas(root: Mapping[str, Any]) -> Collection[str]:
    """References by anchor and by id to schemas that the root holds."""
    names, waiting = set[str](), [dict(root)]
    while waiting:
        schema = waiting.pop()
        if isinstance(anchor := schema.get("$anchor"), str):
            names.add(f"#{anchor}")
        if isinstance(identity := schema.get("$id"), str) and _NAME.fullmatch(identity):
            names.add(identity)
        waiting += [part for key, value in schema.items() for part in parts(key, value)]
    return names


def _is_borne(value: object) -> bool:
    """Whether the library bears the numbers in a value, and rounds none of them."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case float() as number if abs(number) >= LARGEST_CONSTANT:
                return False
            case list() as items:
                waiting += items
            case dict() as pairs:
                waiting += pairs.values()
    return inexact_number(value) is None


def _is_moderate(value: float) -> bool:
    return value == 0 or SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER


def _has_few_digits(value: float) -> bool:
    return int("".join(map(str, Decimal(repr(value)).as_tuple().digits))) <= LARGEST_MULTIPLE


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)

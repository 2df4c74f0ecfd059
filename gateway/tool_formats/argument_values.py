"""Values that a model writes without quotes, and the JSON that they mean: the tool's schema tells text from numbers."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.schema_refs import resolved

TEXT = frozenset(("string",))
# Bounds how far references and alternatives are followed.
MAX_LEVELS = 8
_BY_FIRST = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def value_kinds(schema: Mapping[str, Any], name: str) -> Collection[str]:
    """The JSON types that the argument of this name may have; empty if it may be anything."""
    properties = schema.get("properties")
    return _kinds(schema, properties.get(name) if isinstance(properties, dict) else None, MAX_LEVELS) or frozenset()


def as_json(written: str, kinds: Collection[str]) -> str:
    """A value as JSON: as it is written if that is JSON of one of these types, otherwise as text."""
    try:
        msgspec.json.decode(written, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return json.dumps(written, ensure_ascii=False)
    value = written.strip()
    kind = _BY_FIRST.get(value[0], "number")
    fits = not kinds or kind in kinds or (kind == "number" and "integer" in kinds)
    return value if fits or "string" not in kinds else json.dumps(written, ensure_ascii=False)


def _kinds(root: Mapping[str, Any], schema: object, levels: int) -> frozenset[str] | None:
    """None if the value may be anything, or if that cannot be told."""
    if not isinstance(schema, dict) or not levels:
        return None
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if isinstance(schema.get("$ref"), str):
        return _kinds(root, resolved(root, schema["$ref"]), levels - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _union([_kinds(root, each, levels - 1) for each in schema[key]])
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return TEXT if isinstance(choices, list) and all(isinstance(each, str) for each in choices) else None


def _union(kinds: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [each for each in kinds if each is not None]
    return frozenset[str]().union(*known) if len(known) == len(kinds) else None

"""Values that a model writes without quotes, and the JSON that they mean: the tool's schema tells text from numbers."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from gateway.forms.schema_refs import resolved

TEXT = frozenset(("string",))
# Keywords that limit no value.
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
# Bounds how far references and alternatives are followed.
MAX_LEVELS = 8
_BY_FIRST = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def value_kinds(schema: Mapping[str, Any], name: str) -> Collection[str]:
    """The JSON types that the argument of this name may have; empty if it may be anything."""
    properties = schema.get("properties")
    return _kinds(schema, properties.get(name) if isinstance(properties, dict) else None, MAX_LEVELS) or frozenset()


def written_forms(root: Mapping[str, Any], schema: Any) -> Iterator[tuple[bool, Any]]:
    """The forms of a value whose model says whether it is text: whether it is, and the schema of this form.

    A schema that allows text among others gives JSON alone, which may be quoted text, if it cannot be divided.
    """
    kinds = _kinds(root, schema, MAX_LEVELS)
    limits = schema.keys() - ANNOTATIONS if isinstance(schema, dict) else frozenset[str]()
    if kinds == TEXT:
        yield True, schema
    elif not limits:
        yield from ((True, {}), (False, {}))
    elif kinds is not None and "string" in kinds and "type" in limits:
        yield True, {**schema, "type": "string"}
        yield False, {**schema, "type": sorted(kinds - TEXT)}
    elif len(limits) == 1 and limits <= {"anyOf", "oneOf"} and isinstance(schema[min(limits)], list):
        for each in schema[min(limits)]:
            yield from written_forms(root, each)
    else:
        yield False, schema


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

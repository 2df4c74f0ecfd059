"""A lower bound of the length of JSON that matches a schema.

The bound errs on the short side: keywords that this module does not know count as no requirement.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gateway.forms.schema_refs import resolved

# Texts are cut at this length, so the bound never exceeds it. A client that asks for a longer answer allows enough
# tokens anyway.
MAX_CHARACTERS = 16 * 1024
# Bounds the total of characters written or counted in tokens. If it is exceeded, the length counts as unknown.
MAX_WORK = 1_000_000
# References between schemas count as levels too. One level takes up to ten of Python's thousand stack frames.
MAX_LEVELS = 64
ANYTHING = "0"
# Strings with a minimum length are filled with these characters, many of which fit in one token.
FILLERS = (" ", "-", "a")
COMPACT, SPACED = (",", ":"), (", ", ": ")


class _TooMuchWork(Exception):
    pass


def shortest_json(schema: Mapping[str, Any], tokens: Callable[[str], int]) -> int:
    """Least number of tokens of JSON that matches the schema; 0 if unknown. tokens: counts the tokens of a text."""
    try:
        return min(tokens(_Writer(schema, tokens, *parts).write(schema)) for parts in (COMPACT, SPACED))
    except _TooMuchWork:
        return 0


class _Writer:
    """Writes the shortest JSON of schemas. If several requirements hold together, it takes the one with the longest
    JSON.
    """

    def __init__(self, root: Mapping[str, Any], tokens: Callable[[str], int], comma: str, colon: str) -> None:
        self._root = root
        self._count = tokens
        self._comma, self._colon = comma, colon
        self._work = MAX_WORK
        # JSON of each reference's target. A target that is still being written counts as ANYTHING, which ends
        # recursion.
        self._referenced: dict[str, str] = {}

    def write(self, schema: object, level: int = 0) -> str:
        if not isinstance(schema, dict) or level == MAX_LEVELS:
            return ANYTHING
        if "const" in schema:
            return self._spent(_json(schema["const"]))
        parts = [self._of_types(schema, level)]
        if isinstance(schema.get("enum"), list):
            parts.append(self._shortest(map(_json, schema["enum"])))
        if isinstance(schema.get("$ref"), str):
            parts.append(self._reference(schema["$ref"], level))
        alternatives = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
        parts += [self._shortest(self.write(each, level + 1) for each in several) for several in alternatives]
        if isinstance(schema.get("allOf"), list):
            parts += [self.write(each, level + 1) for each in schema["allOf"]]
        return parts[0] if len(parts) == 1 else max(parts, key=self._tokens)

    def _of_types(self, schema: Mapping[str, Any], level: int) -> str:
        kinds = schema.get("type")
        if not isinstance(kinds, list):
            return self._of_type(kinds, schema, level)
        return self._shortest(self._of_type(kind, schema, level) for kind in kinds)

    def _of_type(self, kind: object, schema: Mapping[str, Any], level: int) -> str:
        match kind:
            case "object":
                return self._object(schema, level)
            case "array":
                return self._array(schema, level)
            case "string":
                length = min(_size(schema.get("minLength")), MAX_CHARACTERS)
                return self._shortest(f'"{filler * length}"' for filler in FILLERS) if length else '""'
            case "boolean":
                return "true"
            case "null":
                return "null"
        return ANYTHING

    def _object(self, schema: Mapping[str, Any], level: int) -> str:
        names, known = schema.get("required"), schema.get("properties")
        known = known if isinstance(known, dict) else {}
        # A schema may name a property twice.
        names = dict.fromkeys(filter(_is_text, names if isinstance(names, list) else ()))
        members = (f"{_json(name)}{self._colon}{self.write(known.get(name), level + 1)}" for name in names)
        return f"{{{self._joined(members)}}}"

    def _array(self, schema: Mapping[str, Any], level: int) -> str:
        size, first = _size(schema.get("minItems")), schema.get("prefixItems")
        first = first[:size] if isinstance(first, list) else []
        items = (self.write(each, level + 1) for each in first)
        begin = self._joined(items)
        others = size - len(first)
        if not others:
            return f"[{begin}]"
        item = self.write(schema.get("items"), level + 1)
        fitting = min(others, 1 + MAX_CHARACTERS // (len(item) + 1))
        return f"[{self._joined([*([begin] if first else []), *([item] * fitting)])}]"

    def _reference(self, reference: str, level: int) -> str:
        if reference not in self._referenced:
            self._referenced[reference] = ANYTHING
            self._referenced[reference] = self.write(resolved(self._root, reference), level + 1)
        return self._referenced[reference]

    def _joined(self, parts: Iterable[str]) -> str:
        text = self._comma.join(_cut(parts))
        return self._spent(text[:MAX_CHARACTERS])

    def _shortest(self, texts: Iterable[str]) -> str:
        return min(texts, key=self._tokens, default=ANYTHING)

    def _tokens(self, text: str) -> int:
        return self._count(self._spent(text))

    def _spent(self, text: str) -> str:
        # An empty text costs something too.
        self._work -= len(text) + 1
        if self._work < 0:
            raise _TooMuchWork
        return text


def _cut(parts: Iterable[str]) -> Iterable[str]:
    """As many parts as it takes to reach MAX_CHARACTERS."""
    size = 0
    for part in parts:
        yield part
        size += len(part)
        if size > MAX_CHARACTERS:
            return


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _size(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=COMPACT)

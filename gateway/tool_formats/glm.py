"""How GLM's models write tool calls: a name, then each argument as a key and a value, with text unquoted.

Source: the chat templates that Z.ai publishes with GLM-4.5, GLM-4.6 (parts on lines of their own) and GLM-4.7.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.answer_forms import json_rule, literal
from gateway.schema_keywords import COMBINING, DEFINITIONS
from gateway.schema_refs import resolved
from gateway.signs import Signs
from gateway.tool_formats.glm_reader import (
    CALL_BEGIN,
    CALL_END,
    KEY_BEGIN,
    KEY_END,
    MARKERS,
    VALUE_BEGIN,
    VALUE_END,
    GlmReader,
)
from gateway.tool_formats.glm_values import TEXT, value_kinds
from gateway.tool_formats.interface import CallReader, Piece, ToolFormat
from gateway.tools import ToolCall
from mesh.errors import InvalidConstraint


class Glm(ToolFormat):
    markers = frozenset(MARKERS)
    # Nothing stands around all calls.
    begin = end = ""
    head = (CALL_BEGIN,)
    tail = (CALL_END,)
    json_arguments = False

    def __init__(self, line_break: str) -> None:
        """line_break: between a call's parts."""
        self._break = self.between = line_break

    def after_name(self, index: int | None) -> Sequence[str | Piece]:
        return (self._break,) if self._break else ()

    def outputs(self, outputs: Sequence[str]) -> str:
        return "\n".join(f"<tool_response>\n{output}\n</tool_response>" for output in outputs)

    def reader(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> CallReader:
        return GlmReader(signs, parallel, new_id, tools)

    def _call(self, index: int, call: ToolCall) -> str:
        try:
            arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return f"{CALL_BEGIN}{call.name}{self._break}{call.arguments}{CALL_END}"
        pairs = (self._pair(key, value) for key, value in arguments.items())
        return f"{CALL_BEGIN}{call.name}{self._break}{''.join(pairs)}{CALL_END}"

    def _pair(self, key: str, value: Any) -> str:
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{KEY_BEGIN}{key}{KEY_END}{self._break}{VALUE_BEGIN}{written}{VALUE_END}{self._break}"

    def argument_rules(
        self, name: str, schema: Mapping[str, Any], lenient: bool, piece: Callable[[str], str]
    ) -> list[str]:
        properties = schema.get("properties")
        named: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
        text = "/[^<]*/" if piece(VALUE_END).startswith('"') else r"/(.|\n)*/"
        line = f"{literal(self._break)} " if self._break else ""

        def pair(key: str, value: str) -> str:
            keyed = f"{piece(KEY_BEGIN)} {key} {piece(KEY_END)} {line}"
            return f"{keyed}{piece(VALUE_BEGIN)} {value} {piece(VALUE_END)} {line}".rstrip()

        rules, parts = list[str](), list[str]()
        for index, (key, value) in enumerate(named.items()):
            rule = f"{name}_{index}"
            rules.append(f"{rule}: {_value_rule(schema, key, value, lenient, text)}")
            written = pair(literal(key), rule)
            parts.append(written if key in schema.get("required", ()) else f"({written})?")
        if schema.get("additionalProperties") is not False or not COMBINING.isdisjoint(schema):
            parts.append(f"({pair('/[^<>]+/', text)})*")
        return [f"{name}: {' '.join(parts) or EMPTY}", *rules]


EMPTY = '""'
_TEXT_LIMITS = frozenset(("pattern", "minLength", "maxLength", "format", "anyOf", "oneOf"))


def _value_rule(schema: Mapping[str, Any], key: str, value: Any, lenient: bool, text: str) -> str:
    if value_kinds(schema, key) != TEXT:
        definitions = {name: schema[name] for name in DEFINITIONS & schema.keys()}
        return json_rule({**value, **definitions} if isinstance(value, dict) else definitions, lenient)
    while isinstance(target := resolved(schema, value.get("$ref", "")), dict):
        value = target
    if not lenient and (limits := _TEXT_LIMITS & value.keys()):
        raise InvalidConstraint(f"{min(limits)} of {key!r} cannot be enforced in this model's calls: leave strict out")
    choices = value.get("enum", [value["const"]] if "const" in value else [])
    return " | ".join(map(literal, choices)) or text


LINES, COMPACT = Glm("\n"), Glm("")

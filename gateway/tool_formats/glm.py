"""How GLM's models write tool calls: a name, then each argument as a key and a value, with text unquoted.

Source: the chat templates that Z.ai publishes with GLM-4.5, GLM-4.6 (parts on lines of their own) and GLM-4.7.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.forms.answer_forms import literal
from gateway.text.signs import Signs
from gateway.tool_formats.argument_values import TEXT, value_kinds
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
from gateway.tool_formats.interface import CallReader, Piece, ToolFormat
from gateway.tool_formats.pair_rules import json_value, pair_rules, texts_of
from gateway.tools import ToolCall


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
        arguments = call.decoded
        if not isinstance(arguments, str):
            arguments = "".join(self._pair(key, value) for key, value in arguments.items())
        return f"{CALL_BEGIN}{call.name}{self._break}{arguments}{CALL_END}"

    def _pair(self, key: str, value: Any) -> str:
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{KEY_BEGIN}{key}{KEY_END}{self._break}{VALUE_BEGIN}{written}{VALUE_END}{self._break}"

    def argument_rules(
        self, name: str, schema: Mapping[str, Any], lenient: bool, piece: Callable[[str], str]
    ) -> list[str]:
        text = "/[^<]*/" if piece(VALUE_END).startswith('"') else r"/(.|\n)*/"
        line = f"{literal(self._break)} " if self._break else ""

        def pair(key: str | None, value: str) -> str:
            written = "/[^<>]+/" if key is None else literal(key)
            keyed = f"{piece(KEY_BEGIN)} {written} {piece(KEY_END)} {line}"
            return f"{keyed}{piece(VALUE_BEGIN)} {value} {piece(VALUE_END)} {line}".rstrip()

        def rule(key: str, value: Any) -> str:
            if value_kinds(schema, key) != TEXT:
                return json_value(schema, value, lenient)
            return " | ".join(map(literal, texts_of(schema, key, value, lenient))) or text

        return pair_rules(name, schema, pair, rule, text)


LINES, COMPACT = Glm("\n"), Glm("")

"""How DeepSeek-V3.2 writes tool calls: DSML, tags with a name, then each argument, text unquoted and the rest in JSON.

Source: the encoding that DeepSeek publishes with DeepSeek-V3.2 (`encoding/` in the model's repository).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.forms.answer_forms import literal
from gateway.text.reasoning import THINK_CLOSE
from gateway.text.signs import Signs
from gateway.tool_formats.argument_values import written_forms
from gateway.tool_formats.dsml_reader import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    DSML,
    LEAD,
    PARAMETER_BEGIN,
    PARAMETER_END,
    DsmlReader,
)
from gateway.tool_formats.interface import CallReader, Piece, ToolFormat
from gateway.tool_formats.pair_rules import json_value, pair_rules, texts_of
from gateway.tools import ToolCall

_VALUE_END = f"{PARAMETER_END}\n"


class Dsml(ToolFormat):
    markers = frozenset((DSML,))
    begin, end, between = LEAD + CALLS_BEGIN, f"\n{CALLS_END}", ""
    head = (f"\n{CALL_BEGIN}",)
    tail = (CALL_END,)
    reasoning_end = THINK_CLOSE
    json_arguments = False

    @property
    def trigger(self) -> str:
        return DSML

    def after_name(self, index: int | None) -> Sequence[str | Piece]:
        return ('">\n',)

    def outputs(self, outputs: Sequence[str]) -> str:
        results = "".join(f"\n<result>{output}</result>" for output in outputs)
        return f"{LEAD}<function_results>{results}\n</function_results>"

    def reader(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> CallReader:
        return DsmlReader(signs, parallel, new_id, tools)

    def written(self, calls: Sequence[tuple[str, str | Mapping[str, Any]]]) -> str:
        """Calls of an earlier turn: names, and arguments that are decoded, or text if they are no object."""
        return self.begin + "".join(self._invoke(name, arguments) for name, arguments in calls) + self.end

    def _call(self, index: int, call: ToolCall) -> str:
        return self._invoke(call.name, call.decoded)

    def _invoke(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        if not isinstance(arguments, str):
            arguments = "\n".join(_parameter(key, value) for key, value in arguments.items())
        return f'\n{CALL_BEGIN}{name}">\n{arguments}\n{CALL_END}'

    def argument_rules(
        self, name: str, schema: Mapping[str, Any], lenient: bool, piece: Callable[[str], str]
    ) -> list[str]:
        any_text, definitions = _any_text(name, piece)

        def pair(key: str | None, rule: str) -> str:
            written = r'/[^"<>]+" string="/' if key is None else literal(f'{key}" string="')
            return f"{piece(PARAMETER_BEGIN)} {written} {rule}"

        def value(key: str, each: Any) -> str:
            return " | ".join(
                text(key, form) if is_text else f'"false\\">" {json_value(schema, form, lenient)} {piece(_VALUE_END)}'
                for is_text, form in written_forms(schema, each)
            )

        def text(key: str, each: Mapping[str, Any]) -> str:
            choices = (piece(choice + _VALUE_END) for choice in texts_of(schema, key, each, lenient))
            return f'"true\\">" ({" | ".join(choices) or any_text})'

        anything = value("", schema.get("additionalProperties", True))
        arguments, *values = pair_rules(name, schema, pair, value, f"({anything})")
        if not schema.get("required"):
            # A call without arguments has an empty line in their place.
            arguments += r' | "\n"'
        return [arguments, *values, *definitions]


def _parameter(key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    written = value if is_text else json.dumps(value, ensure_ascii=False)
    return f'{PARAMETER_BEGIN}{key}" string="{"true" if is_text else "false"}">{written}{PARAMETER_END}'


def _any_text(name: str, piece: Callable[[str], str]) -> tuple[str, list[str]]:
    """The right side of a rule for any text and the tag that ends it, and the definitions that it needs."""
    before, _, after = _VALUE_END.partition(DSML)
    if (token := piece(DSML)).startswith("<"):
        # Text may contain the beginning of a closing tag, so it takes that in: only a token ends an expression which
        # could go on.
        return f"/(.|\\n)*{_escaped(before)}/ {token} {literal(after)}", []
    return f"{name}_text", [f"{name}_text[lazy]: /(.|\\n)*{_escaped(_VALUE_END)}/"]


def _escaped(text: str) -> str:
    return text.replace("/", r"\/").replace("\n", r"\n")


V32 = Dsml()

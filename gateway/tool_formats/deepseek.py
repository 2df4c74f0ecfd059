"""How DeepSeek's models write tool calls.

A call is its name and its arguments in JSON between markers; one more pair of markers surrounds all calls. Models
before V3.1 write the word "function" before the name, and the arguments as a Markdown code block.
Source: the chat templates that DeepSeek publishes with V3, R1 and V3.1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.text.signs import Signs
from gateway.tool_formats.deepseek_reader import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    FENCED_KIND,
    SEPARATOR,
    DeepSeekReader,
)
from gateway.tool_formats.interface import CallReader, Piece, ToolFormat

OUTPUTS_BEGIN, OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


class DeepSeekV31(ToolFormat):
    """NAME, separator, arguments."""

    markers = frozenset(
        (
            *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
            *(OUTPUTS_BEGIN, OUTPUTS_END, OUTPUT_BEGIN, OUTPUT_END),
        )
    )
    begin, end, between = CALLS_BEGIN, CALLS_END, "\n"
    head: Sequence[str] = (CALL_BEGIN,)
    tail: Sequence[str] = (CALL_END,)

    def after_name(self, index: int | None) -> Sequence[str | Piece]:
        return (SEPARATOR,)

    def outputs(self, outputs: Sequence[str]) -> str:
        return OUTPUTS_BEGIN + "".join(OUTPUT_BEGIN + output + OUTPUT_END for output in outputs) + OUTPUTS_END

    def reader(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> CallReader:
        # Either form is understood whatever the template shows: models know both.
        return DeepSeekReader(signs, parallel, new_id)


class DeepSeekV3(DeepSeekV31):
    """The first form: the word "function", separator, NAME, and the arguments in a code block."""

    head = (CALL_BEGIN, FENCED_KIND, SEPARATOR)
    tail = ("\n```", CALL_END)

    def after_name(self, index: int | None) -> Sequence[str | Piece]:
        return ("\n```json\n",)


V3, V31 = DeepSeekV3(), DeepSeekV31()

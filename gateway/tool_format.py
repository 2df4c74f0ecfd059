"""How DeepSeek's models write tool calls, and how prompts list tools and their results.

A call is its name and its arguments in JSON between markers; one more pair of markers surrounds all calls. Models
before V3.1 write the word "function" before the name, and the arguments as a Markdown code block: the fenced form.
Source: the chat templates that DeepSeek publishes with V3, R1 and V3.1.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from gateway.tools import ToolCall

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
OUTPUTS_BEGIN, OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
MARKERS = frozenset(
    (
        *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
        *(OUTPUTS_BEGIN, OUTPUTS_END, OUTPUT_BEGIN, OUTPUT_END),
    )
)
FENCED_KIND = "function"
FENCE_OPEN, FENCE_CLOSE = "```json\n", "\n```"


class CallForm(Enum):
    """How a call is written between its markers."""

    # NAME, separator, arguments.
    PLAIN = "plain"
    # The word "function", separator, NAME, and the arguments in a code block.
    FENCED = "fenced"


def form_of(template: str) -> CallForm:
    """The form in which a chat template shows calls to its model."""
    return CallForm.FENCED if "```json" in template else CallForm.PLAIN


def opening(form: CallForm, name: str | None) -> str:
    """The beginning of an answer that calls a tool: up to the name, or up to the arguments if the name is known."""
    head = CALLS_BEGIN + CALL_BEGIN
    if form is CallForm.FENCED:
        head += FENCED_KIND + SEPARATOR
        return head if name is None else f"{head}{name}\n{FENCE_OPEN}"
    return head if name is None else head + name + SEPARATOR


def written_calls(calls: Sequence[ToolCall], form: CallForm) -> str:
    """Calls of an earlier turn, in the model's own form."""
    return CALLS_BEGIN + "\n".join(_written_call(call, form) for call in calls) + CALLS_END


def _written_call(call: ToolCall, form: CallForm) -> str:
    if form is CallForm.FENCED:
        inner = f"{FENCED_KIND}{SEPARATOR}{call.name}\n{FENCE_OPEN}{call.arguments}{FENCE_CLOSE}"
    else:
        inner = call.name + SEPARATOR + call.arguments
    return CALL_BEGIN + inner + CALL_END


def written_outputs(outputs: Sequence[str]) -> str:
    """The results of tools, in the order of the calls."""
    return OUTPUTS_BEGIN + "".join(OUTPUT_BEGIN + output + OUTPUT_END for output in outputs) + OUTPUTS_END


def written_tools(tools: Sequence[Mapping[str, Any]], form: CallForm) -> str:
    """System text that tells a model which tools there are, for templates that do not. tools: in OpenAI's form."""
    parts = ["## Tools\nThese functions can be called:"]
    for tool in tools:
        function = tool["function"]
        schema = msgspec.json.encode(function.get("parameters") or {}).decode()
        description = function.get("description") or ""
        parts.append(f"### {function['name']}\n{description}\nParameters (JSON schema): {schema}")
    example = written_calls([ToolCall("", "NAME", "ARGUMENTS")], form)
    parts.append(
        f"To call functions, write their names and their arguments as JSON in exactly this form:\n{example}\n"
        "Several calls stand one after the other inside the outer markers. Wait for their results before you answer."
    )
    return "\n\n".join(parts)

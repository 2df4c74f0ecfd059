"""How DeepSeek's models write calls of tools, and read what tools are there and what they answered.

A call is its name and its arguments in JSON between markers, all calls together in one more pair. Models before V3.1
write the word "function" before the name, and the arguments as a Markdown code block: the fenced form.
Source: the chat templates that DeepSeek publishes with V3, R1 and V3.1.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec

from gateway.tools import Tool, ToolCall

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
    """The form that a chat template shows its model."""
    return CallForm.FENCED if "```json" in template else CallForm.PLAIN


def opening(form: CallForm, name: str | None) -> str:
    """How an answer that calls a tool begins: up to the name, or if it is known up to the arguments."""
    head = CALLS_BEGIN + CALL_BEGIN
    if form is CallForm.FENCED:
        head += FENCED_KIND + SEPARATOR
        return head if name is None else f"{head}{name}\n{FENCE_OPEN}"
    return head if name is None else head + name + SEPARATOR


def written_calls(calls: Sequence[ToolCall], form: CallForm) -> str:
    """Calls of an earlier turn as the model wrote them."""
    return CALLS_BEGIN + "\n".join(_written_call(call, form) for call in calls) + CALLS_END


def _written_call(call: ToolCall, form: CallForm) -> str:
    if form is CallForm.FENCED:
        inner = f"{FENCED_KIND}{SEPARATOR}{call.name}\n{FENCE_OPEN}{call.arguments}{FENCE_CLOSE}"
    else:
        inner = call.name + SEPARATOR + call.arguments
    return CALL_BEGIN + inner + CALL_END


def written_outputs(outputs: Sequence[str]) -> str:
    """What tools answered, in the order of the calls."""
    return OUTPUTS_BEGIN + "".join(OUTPUT_BEGIN + output + OUTPUT_END for output in outputs) + OUTPUTS_END


def written_tools(tools: Sequence[Tool], form: CallForm) -> str:
    """System text that tells a model which tools there are, for templates that do not."""
    parts = ["## Tools\nThese functions can be called:"]
    for tool in tools:
        schema = msgspec.json.encode(tool.parameters).decode()
        parts.append(f"### {tool.name}\n{tool.description}\nParameters (JSON schema): {schema}")
    example = written_calls([ToolCall("", "NAME", "ARGUMENTS")], form)
    parts.append(
        f"To call functions, write their names and their arguments as JSON in exactly this form:\n{example}\n"
        "Several calls stand one after the other inside the outer markers. Wait for their results before you answer."
    )
    return "\n\n".join(parts)

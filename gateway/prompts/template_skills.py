"""What a chat template can write of a turn that calls tools: found by trying, once, when the template is loaded.

Published templates disagree: DeepSeek's first ones write calls only if the content is None, later ones need text there;
some take arguments as JSON text, others as an object; some know nothing of calls. A template that is given a turn in
the wrong form fails, or silently drops a part of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from gateway.tool_formats.choice import format_of
from gateway.tool_formats.interface import ToolFormat
from mesh.errors import InvalidRequest

# Words that no template writes by itself.
ASKED, SAID, NAME, KEY, VALUE, RESULT = "askedprobe", "saidprobe", "nameprobe", "keyprobe", "valueprobe", "resultprobe"
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}

# A message as templates get it.
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which the template takes a turn with calls, so that it writes all of it."""

    # The content of a turn without text.
    no_text: str | None
    # Whether text and calls of one turn must be two messages.
    apart: bool
    # Whether arguments must be an object rather than JSON text.
    decoded: bool

    def turn(self, content: str, calls: Sequence[Message], **fields: Any) -> list[Message]:
        """The messages of one turn. Only the first has `fields`."""
        if content and self.apart:
            return [_assistant(content, **fields), _assistant(self.no_text, tool_calls=list(calls))]
        return [_assistant(content or self.no_text, **fields, tool_calls=list(calls))]


@dataclass(frozen=True, slots=True)
class TemplateSkills:
    """The parts of a chat that a template writes by itself."""

    tools: bool
    # None if the template cannot write calls, or loses a part of them whatever their form.
    calls: CallStyle | None
    # How the model writes calls in its answers.
    format: ToolFormat
    # Whether a developer is another role than the system.
    developers: bool = False
    # Whether the prompt tells the model the schema that its answer must match.
    schemas: bool = False

    @classmethod
    def of(
        cls,
        source: str,
        variables: set[str],
        run: Callable[[Mapping[str, Any]], str],
        control_id: Callable[[str], int | None] = lambda text: None,
    ) -> "TemplateSkills":
        """variables: those that the template reads. run: renders it; raises InvalidRequest if it fails. control_id: of
        the model's tokenizer.
        """
        tools = "tools" in variables
        given = {"tools": [PROBE_TOOL] if tools else None}
        styles = (CallStyle(*each) for each in _styles()) if "tool_calls" in source else ()
        fitting = (style for style in styles if all(_writes(probe, run, given) for probe in _probes(style)))
        return cls(tools, next(fitting, None), format_of(source, control_id))


def _styles() -> Iterator[tuple[str | None, bool, bool]]:
    """Styles, those that change least first: most clients' own form is text arguments next to the content."""
    for decoded, apart, no_text in product((False, True), (False, True), ("", None)):
        yield no_text, apart, decoded


def _probes(style: CallStyle) -> Iterator[tuple[list[Message], list[str]]]:
    """Chats, and the words that their prompts must have, in order."""
    arguments = {KEY: VALUE} if style.decoded else f'{{"{KEY}": "{VALUE}"}}'
    call = {"id": "call_probe", "type": "function", "function": {"name": NAME, "arguments": arguments}}
    for content in ("", SAID):
        chat = [
            {"role": "user", "content": ASKED},
            *style.turn(content, [call]),
            {"role": "tool", "content": RESULT, "tool_call_id": "call_probe"},
        ]
        yield chat, [ASKED, *([content] if content else []), NAME, KEY, VALUE, RESULT]


def _writes(
    probe: tuple[list[Message], list[str]], run: Callable[[Mapping[str, Any]], str], given: dict[str, Any]
) -> bool:
    messages, words = probe
    try:
        text = run({"messages": messages, **given})
    except InvalidRequest:
        return False
    # Text that a template writes as JSON is quoted a second time.
    return f'\\"{KEY}' not in text and _in_order(words, text)


def _in_order(words: list[str], text: str) -> bool:
    place = text.find(ASKED)
    for word in words:
        place = text.find(word, place) if place >= 0 else -1
    return place >= 0


def _assistant(content: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}

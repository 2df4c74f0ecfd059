"""What a reader of tool calls makes of a model's text."""

from collections.abc import Iterable

from gateway.text.signs import Signs
from gateway.tool_formats.interface import CallReader
from gateway.tools import ToolCall


def read_calls(
    reader: CallReader, pieces: Iterable[str], signs: Signs, opening: str = ""
) -> tuple[str, list[ToolCall]]:
    """Content and calls of a text that comes in `pieces`, after `opening`, which the prompt began."""
    content, names, arguments = "", list[str](), list[str]()
    for parsed in [reader.begin(signs.signed(opening)), *map(reader.push, pieces), reader.finish()]:
        content += signs.spelled(parsed.content)
        for delta in parsed.calls:
            if delta.name is not None:
                names.append(delta.name)
                arguments.append("")
            arguments[delta.index] += signs.spelled(delta.arguments)
    return content, [ToolCall("", *pair) for pair in zip(names, arguments, strict=True)]

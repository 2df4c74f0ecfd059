"""The grammar of tool calls: only names that exist, and arguments that match their schema."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.forms.answer_forms import ANY_OBJECT, json_rule, literal
from gateway.forms.schema_closing import closed
from gateway.forms.schema_keywords import COMBINING
from gateway.tool_formats.interface import Piece, ToolFormat
from gateway.tools import Tool, Toolbox
from mesh.errors import InvalidConstraint
from mesh.text.grammars import check_grammar

EMPTY = '""'


class ToolGrammar:
    """Rules for one request's calls. `control` gives a marker's token id; None if the marker is plain text."""

    def __init__(self, toolbox: Toolbox, format: ToolFormat, control: Callable[[str], int | None]) -> None:
        self._toolbox = toolbox
        self.format = format
        self.control = control
        # Markers that are tokens.
        self._tokens = {text: token_id for text in format.markers if (token_id := control(text)) is not None}
        self._splitter = re.compile(f"({'|'.join(map(re.escape, self._tokens)) or '(?!)'})")

    def begun(self) -> str:
        """The rest of calls that begin in the prompt: from the name on, or from the arguments on if only one tool is
        possible.
        """
        name = self._toolbox.forced_name
        if name is None:
            return f"{self._named_call()} more"
        (index,) = (index for index, tool in enumerate(self._toolbox.tools) if tool.name == name)
        return f"{self._arguments(index)} more"

    def whole(self) -> str:
        """The calls from their beginning on."""
        return f"{self.piece(self.format.start)} {self._first_call()}"

    def unbegun(self) -> str:
        """The calls after the marker with which they begin."""
        _, _, rest = self.format.start.partition(self.format.trigger)
        return f"{self.piece(rest)} {self._first_call()}" if rest else self._first_call()

    def rules(self) -> str:
        """Definitions of the rules that the others name."""
        end = self.piece(self.format.end) if self.format.end else ""
        between = f"{literal(self.format.between)}? " if self.format.between else ""
        several = self._toolbox.parallel and self._toolbox.named is None
        more = f"({between}call)* {end}" if several else end
        arguments = (
            rule for index, tool in enumerate(self._toolbox.tools) for rule in self._argument_rules(index, tool)
        )
        call = f"{self._pieces(self.format.head)} {self._named_call()}"
        return "\n".join((f"more: {more or EMPTY}", f"call: {call}", *arguments))

    def _argument_rules(self, index: int, tool: Tool) -> list[str]:
        return self.format.argument_rules(f"arguments{index}", arguments_schema(tool), not tool.strict, self.piece)

    def _first_call(self) -> str:
        return "call more" if self.format.begin else f"{self._named_call()} more"

    def _named_call(self) -> str:
        """A call from its name on."""
        after = self._pieces(self.format.after_name(None))
        tools = (f"{literal(tool.name)} {after} {self._arguments(i)}" for i, tool in enumerate(self._toolbox.tools))
        return f"({' | '.join(tools)})"

    def _arguments(self, index: int) -> str:
        return f"arguments{index} {self._pieces(self.format.tail)}"

    def _pieces(self, pieces: Sequence[str | Piece]) -> str:
        return " ".join(map(self.piece, pieces))

    def piece(self, text: str | Piece) -> str:
        """A piece of a call's text: markers in it that the vocabulary has are tokens."""
        if isinstance(text, Piece):
            return text.rule
        parts = filter(None, self._splitter.split(text))
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else literal(part) for part in parts)


def wrong_tool(toolbox: Toolbox) -> Tool | None:
    """The first tool whose arguments give an invalid grammar."""
    for tool in toolbox.tools:
        try:
            check_grammar(f"start: {_arguments_rule(tool)}")
        except InvalidConstraint:
            return tool
    return None


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema that the tool's arguments must match."""
    # A tool that names no arguments takes none, unless other schemas name them.
    named: dict[str, Any] = {} if COMBINING & tool.parameters.keys() else {"properties": {}}
    return closed({**ANY_OBJECT, **named, **tool.parameters})


def _arguments_rule(tool: Tool) -> str:
    """If the tool is not strict, parts of its schema that cannot be enforced are left out."""
    return json_rule(arguments_schema(tool), lenient=not tool.strict)

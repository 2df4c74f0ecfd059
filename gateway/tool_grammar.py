"""The grammar of tool calls: only names that exist, and arguments that match their schema."""

from collections.abc import Callable, Mapping
from typing import Any

from gateway.answer_forms import ANY_OBJECT, closed, json_rule, literal
from gateway.tool_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_END,
    FENCE_CLOSE,
    FENCE_OPEN,
    FENCED_KIND,
    SEPARATOR,
    CallForm,
)
from gateway.tools import Tool, Toolbox
from mesh.errors import InvalidConstraint
from mesh.grammars import check_grammar


class ToolGrammar:
    """Rules for one request's calls. `control` gives a marker's token id; None if the marker is plain text."""

    def __init__(self, toolbox: Toolbox, form: CallForm, control: Callable[[str], int | None]) -> None:
        self._toolbox = toolbox
        self._form = form
        self.control = control

    def begun(self) -> str:
        """The rest of calls that begin in the prompt: from the name on, or from the arguments on if only one tool is
        possible.
        """
        name = self._toolbox.forced_name
        tools = self._toolbox.tools
        if name is not None:
            (first,) = (self._arguments(index) for index, tool in enumerate(tools) if tool.name == name)
        else:
            first = self._after_kind()
        return f"{first} more"

    def unbegun(self) -> str:
        """The calls after the marker that opens them."""
        return "call more"

    def rules(self) -> str:
        """Definitions of the rules that `begun` and `unbegun` name."""
        end = self.marker(CALLS_END)
        several = self._toolbox.parallel and self._toolbox.named is None
        more = f'("\\n"? call)* {end}' if several else end
        arguments = (f"arguments{index}: {_arguments_rule(tool)}" for index, tool in enumerate(self._toolbox.tools))
        kind = f"{literal(FENCED_KIND)} {self.marker(SEPARATOR)} " if self._form is CallForm.FENCED else ""
        call = f"{self.marker(CALL_BEGIN)} {kind}{self._after_kind()}"
        return "\n".join((f"more: {more}", f"call: {call}", *arguments))

    def _after_kind(self) -> str:
        """A call from its name on."""
        tools = (f"{self._name(tool)} {self._arguments(index)}" for index, tool in enumerate(self._toolbox.tools))
        return f"({' | '.join(tools)})"

    def _name(self, tool: Tool) -> str:
        if self._form is CallForm.FENCED:
            return literal(f"{tool.name}\n{FENCE_OPEN}")
        return f"{literal(tool.name)} {self.marker(SEPARATOR)}"

    def _arguments(self, index: int) -> str:
        close = f"{literal(FENCE_CLOSE)} " if self._form is CallForm.FENCED else ""
        return f"arguments{index} {close}{self.marker(CALL_END)}"

    def marker(self, text: str) -> str:
        token_id = self.control(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"


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
    return closed({**ANY_OBJECT, "properties": {}, **tool.parameters})


def _arguments_rule(tool: Tool) -> str:
    """If the tool is not strict, parts of its schema that cannot be enforced are left out."""
    return json_rule(arguments_schema(tool), lenient=not tool.strict)

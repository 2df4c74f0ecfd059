"""Tools in the words of OpenAI's chats: what is offered, what may be called, what was called."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.tools import Tool, Toolbox, ToolCall, ToolCallDelta
from mesh.errors import InvalidRequest


class FunctionBody(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    # JSON schema of the arguments.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct, forbid_unknown_fields=True):
    function: FunctionBody
    type: Literal["function"] = "function"

    def to_tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict))


class ChosenFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedChoice(Struct, forbid_unknown_fields=True):
    function: ChosenFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    # JSON.
    arguments: str


class CallBody(Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    # Clients that add up a stream send its field back.
    index: int | UnsetType = UNSET

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """A piece of a call: the first has its id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


def toolbox(tools: list[ToolBody] | None, choice: ToolChoice | None, parallel: bool | None) -> Toolbox | None:
    """What the model may call; None if it may call nothing. `check_toolbox` has yet to judge it."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools: send them, or leave it out", field="tool_choice")
        return None
    offered = [tool.to_tool() for tool in tools]
    if choice == "none":
        return None
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    return Toolbox(offered, required=choice == "required", named=named, parallel=parallel is not False)


def call_deltas(deltas: list[ToolCallDelta]) -> list[CallDelta]:
    """One entry a call."""
    merged: dict[int, CallDelta] = {}
    for delta in deltas:
        entry = merged.setdefault(delta.index, CallDelta(delta.index, FunctionDelta("")))
        entry.function.arguments += delta.arguments
        if delta.name is not None and delta.id is not None:
            entry.id, entry.type, entry.function.name = delta.id, "function", delta.name
    return list(merged.values())


def whole_calls(deltas: list[ToolCallDelta]) -> list[CallBody]:
    """The calls that these deltas make, from the first on."""
    calls = call_deltas(deltas)
    return [CallBody(str(call.id), CalledFunction(str(call.function.name), call.function.arguments)) for call in calls]

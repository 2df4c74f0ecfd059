"""Tools in the form of OpenAI's chats: those offered, those that may be called, and the calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.tools import Tool, Toolbox, ToolCall, ToolCallDelta
from mesh.errors import InvalidRequest, MissingField


class FunctionBody(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    # JSON schema of the arguments.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self, place: str) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or {}, bool(self.strict), place)


class ToolBody(Struct, forbid_unknown_fields=True, dict=True):
    function: FunctionBody
    type: Literal["function"] = "function"

    # The tool as the client wrote it: see `keep_tools`.
    given: ClassVar[dict[str, Any] | None] = None

    def to_tool(self, place: str) -> Tool:
        return replace(self.function.to_tool(f"{place}.function"), given=self.given)


class _GivenTools(Struct):
    tools: list[dict[str, Any]]


def keep_tools(tools: Sequence[ToolBody], content: bytes) -> None:
    """Remember of each tool which keys the client wrote, in which order: chat templates show it so to the model.

    content: the JSON from which the body with these tools was decoded. Raises InvalidRequest if they are nested too
    deep.
    """
    try:
        given = msgspec.json.decode(content, type=_GivenTools).tools
    except RecursionError:
        raise InvalidRequest("tools are nested too deep", field="tools") from None
    for tool, each in zip(tools, given, strict=True):
        tool.__dict__["given"] = each


class ChosenFunction(Struct, forbid_unknown_fields=True):
    name: str


class ChosenTool(Struct, forbid_unknown_fields=True):
    function: ChosenFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct, forbid_unknown_fields=True):
    tools: list[ChosenTool]
    mode: Literal["auto", "required"] = "auto"


class ChoiceBody(Struct, forbid_unknown_fields=True):
    """The one tool that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None

    def to_choice(self) -> "NamedTool | AllowedNames":
        if self.type == "function":
            if self.function is None:
                raise _missing("tool_choice.function")
            return NamedTool(self.function.name)
        if self.allowed_tools is None:
            raise _missing("tool_choice.allowed_tools")
        names = [tool.function.name for tool in self.allowed_tools.tools]
        return AllowedNames(names, self.allowed_tools.mode, "tool_choice.allowed_tools.tools")


ToolChoice = Literal["none", "auto", "required"] | ChoiceBody


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The model must call this tool."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedNames:
    """The model sees only these tools."""

    names: Sequence[str]
    mode: Literal["auto", "required"]
    # The request field that names them.
    field: str


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    # The arguments, as JSON.
    arguments: str


class CallBody(Struct, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    # Accepted and ignored: clients that assemble calls from a stream send it back.
    index: int | UnsetType = UNSET

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """A piece of a call. A call's first piece has its id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


def toolbox(
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedTool | AllowedNames | None,
    parallel: bool | None,
) -> Toolbox | None:
    """The tools that the model may call; None if it may call none. The caller must still pass it to `check_toolbox`."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools: send them, or leave it out", field="tool_choice")
        return None
    if choice == "none":
        return None
    if isinstance(choice, AllowedNames):
        tools, choice = _allowed(tools, choice), choice.mode
    named = choice.name if isinstance(choice, NamedTool) else None
    return Toolbox(tools, required=choice == "required", named=named, parallel=parallel is not False)


def _allowed(tools: Sequence[Tool], choice: AllowedNames) -> list[Tool]:
    names = set(choice.names)
    if unknown := names.difference(tool.name for tool in tools):
        raise InvalidRequest(f"{min(unknown)!r} is allowed, but is no tool", field=choice.field)
    return [tool for tool in tools if tool.name in names]


def _missing(field: str) -> MissingField:
    return MissingField(f"the field {field!r} is missing", field=field)


def call_deltas(deltas: list[ToolCallDelta]) -> list[CallDelta]:
    """The deltas merged to one entry for each call."""
    merged: dict[int, CallDelta] = {}
    for delta in deltas:
        entry = merged.setdefault(delta.index, CallDelta(delta.index, FunctionDelta("")))
        entry.function.arguments += delta.arguments
        if delta.name is not None and delta.id is not None:
            entry.id, entry.type, entry.function.name = delta.id, "function", delta.name
    return list(merged.values())


def whole_calls(deltas: list[ToolCallDelta]) -> list[CallBody]:
    """Whole calls, made from all of their deltas."""
    calls = call_deltas(deltas)
    return [CallBody(str(call.id), CalledFunction(str(call.function.name), call.function.arguments)) for call in calls]

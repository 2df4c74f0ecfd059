"""Tools in the form of the Responses API."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from gateway.openai.tools import AllowedNames, FunctionBody, NamedTool
from gateway.tools import Tool, check_tool_count
from mesh.errors import MissingField, Unsupported


class FunctionTool(Struct, forbid_unknown_fields=True):
    """A function tool. Tools that OpenAI runs itself have other types and are refused."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    # JSON schema of the arguments.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str

    def to_choice(self) -> NamedTool:
        return NamedTool(self.name)


class AllowedTools(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """The model sees only these tools."""

    tools: list[FunctionTool]
    mode: Literal["auto", "required"] = "auto"

    def to_choice(self) -> AllowedNames:
        field = "tool_choice.tools"
        return AllowedNames([_name(tool, f"{field}[{i}]") for i, tool in enumerate(self.tools)], self.mode, field)


def offered(tools: Sequence[FunctionTool]) -> list[Tool]:
    check_tool_count(len(tools))
    offers = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.type != "function":
            raise Unsupported(f"tools of type {tool.type!r} are not supported: send functions", field=f"{place}.type")
        name = _name(tool, place)
        offers.append(FunctionBody(name, tool.description, tool.parameters, tool.strict).to_tool(place))
    return offers


def _name(tool: FunctionTool, place: str) -> str:
    if tool.name is None:
        raise MissingField(f"the field '{place}.name' is missing", field=f"{place}.name")
    return tool.name

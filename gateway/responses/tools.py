"""Tools in the words of the Responses API, as those of chats."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from gateway.openai.tools import ChosenFunction, FunctionBody, NamedChoice, ToolBody, ToolChoice
from mesh.errors import InvalidRequest, MissingField, Unsupported


class FunctionTool(Struct, forbid_unknown_fields=True):
    """A function. The tools that OpenAI runs itself have other types, which are refused."""

    type: str = "function"
    name: str | None = None
    description: str | None = None
    # JSON schema of the arguments.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class AllowedTools(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """The model sees only these of the tools."""

    tools: list[FunctionTool]
    mode: Literal["auto", "required"] = "auto"


def offered(tools: Sequence[FunctionTool]) -> list[ToolBody]:
    bodies = []
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if tool.type != "function":
            raise Unsupported(f"tools of type {tool.type!r} are not supported: send functions", field=f"{field}.type")
        if tool.name is None:
            raise MissingField(f"the field '{field}.name' is missing", field=f"{field}.name")
        bodies.append(ToolBody(FunctionBody(tool.name, tool.description, tool.parameters, tool.strict)))
    return bodies


def chosen(
    tools: list[ToolBody], choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None
) -> tuple[list[ToolBody], ToolChoice | None]:
    """What the model is offered, and the choice in the words of chats. Raises InvalidRequest."""
    if isinstance(choice, NamedFunction):
        return tools, NamedChoice(ChosenFunction(choice.name))
    if not isinstance(choice, AllowedTools):
        return tools, choice
    names = {tool.name for tool in choice.tools}
    if unknown := names - {tool.function.name for tool in tools}:
        raise InvalidRequest(f"{min(map(str, unknown))!r} is allowed, but is no tool", field="tool_choice.tools")
    return [tool for tool in tools if tool.function.name in names], choice.mode

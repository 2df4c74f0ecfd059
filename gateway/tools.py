"""Functions that a client offers to the model, and the model's calls of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.requests import validate_text
from mesh.errors import InvalidRequest

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 65536
# Bounds the nesting of objects and lists in a schema: its readers, and templates, recurse for each level.
MAX_NESTING = 100

# The types that decoded JSON nests in.
_CONTAINERS = frozenset((dict, list))
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    # JSON schema of the arguments, as decoded JSON.
    parameters: Mapping[str, Any]
    # Refuse a schema of which a part cannot be enforced, and hold the model to it whenever it calls the tool.
    strict: bool = False
    # The tool's place in the request, and the request's name for the schema: for errors.
    place: str = "tools"
    schema_name: str = "parameters"
    # The tool in OpenAI's form as its client sent it, with its own keys and their order; None if it came in another
    # form.
    given: Mapping[str, Any] | None = None

    @property
    def form(self) -> Mapping[str, Any]:
        """The tool in OpenAI's form, which chat templates expect."""
        if self.given is not None:
            return self.given
        fields = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        function = {"name": self.name, **{name: value for name, value in fields.items() if value}}
        return {"type": "function", "function": function}

    @property
    def schema_field(self) -> str:
        return f"{self.place}.{self.schema_name}"


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, of which the model may call some."""

    tools: Sequence[Tool]
    # The model must call a tool instead of answering.
    required: bool = False
    # The model must call this one.
    named: str | None = None
    # The model may call several at once.
    parallel: bool = True

    @property
    def forced_name(self) -> str | None:
        """The tool that the model must call, if there is no other choice."""
        if self.named is None and self.required and len(self.tools) == 1:
            return self.tools[0].name
        return self.named


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of an earlier turn, as its client sends it back."""

    id: str
    name: str
    # JSON, as the model wrote it.
    arguments: str

    @property
    def decoded(self) -> str | Mapping[str, Any]:
        """The arguments as an object; as they are if they are none, for example because they were cut off."""
        try:
            return msgspec.json.decode(self.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return self.arguments


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call. A call's first piece has its id and name; the others bring more of its arguments."""

    # Which call of the answer it is.
    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def check_tool_count(count: int) -> None:
    """Raises InvalidRequest if there are too many tools. Check before converting any."""
    if count > MAX_TOOLS:
        raise InvalidRequest(f"there are {count} tools, the limit is {MAX_TOOLS}", field="tools")


def check_toolbox(toolbox: Toolbox) -> None:
    """Raises InvalidRequest naming the first field that is wrong."""
    if not toolbox.tools:
        raise InvalidRequest("tools is empty: send at least one, or leave tool_choice out", field="tools")
    names: set[str] = set()
    for tool in toolbox.tools:
        if not _NAME.fullmatch(tool.name):
            allowed = "1 to 64 letters, digits, underscores and dashes"
            raise InvalidRequest(f"a tool's name must have {allowed}, not {tool.name!r}", field=f"{tool.place}.name")
        if tool.name in names:
            raise InvalidRequest(f"two tools are named {tool.name!r}", field=f"{tool.place}.name")
        if len(tool.description) > MAX_DESCRIPTION_CHARACTERS:
            limit = MAX_DESCRIPTION_CHARACTERS
            raise InvalidRequest(f"a description is longer than {limit} characters", field=f"{tool.place}.description")
        validate_text(tool.description, field=f"{tool.place}.description")
        check_nesting(tool.parameters, field=tool.schema_field)
        names.add(tool.name)
    if toolbox.named is not None and toolbox.named not in names:
        raise InvalidRequest(f"tool_choice names {toolbox.named!r}, which is not among tools", field="tool_choice")


def check_nesting(schema: Any, field: str) -> None:
    """Check a schema's depth before anything writes it. Raises InvalidRequest."""
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        # No number is looked at in Python, for there may be a million.
        deeper = (parts for parts in inner if not _CONTAINERS.isdisjoint(map(type, parts)))
        level = [part for parts in deeper for part in parts if type(part) in _CONTAINERS]
    if level:
        raise InvalidRequest(f"{field} is nested deeper than {MAX_NESTING} levels", field=field)

"""Turns a client's messages and tools into the variables that a chat template gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.prompts.control_text import ControlTextShield
from gateway.prompts.template_skills import Message, TemplateSkills
from gateway.tool_formats.choice import written_tools
from gateway.tools import Toolbox, ToolCall
from mesh.errors import InvalidRequest

# Names under which templates look for reasoning.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    # Calls that an assistant made.
    tool_calls: Sequence[ToolCall] = ()
    # Which call a tool's message answers; None if the client leaves that to their order.
    tool_call_id: str | None = None
    # Who speaks, for templates that write it.
    name: str | None = None
    # What an assistant thought before it said this.
    reasoning: str | None = None

    @property
    def characters(self) -> int:
        """Characters of text in the message."""
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.name or "") + len(self.reasoning or "") + calls


@dataclass(frozen=True, slots=True)
class _Turn:
    message: ChatMessage
    # The arguments of each call, as the template takes them: JSON text, or an object.
    arguments: Sequence[str | Mapping[str, Any]]


class Turns:
    """The messages of one chat for one template.

    Clients' text is disguised first, all of it at once; whatever is added later is ours.
    """

    def __init__(
        self,
        messages: Sequence[ChatMessage],
        toolbox: Toolbox | None,
        answer_schema: Mapping[str, Any] | None,
        skills: TemplateSkills,
        starts: Sequence[str],
    ) -> None:
        """answer_schema: that the answer must match. starts: what control tokens can begin with."""
        self._skills = skills
        chat = [_Turn(message, self._arguments(message)) for message in in_order_of_calls(messages)]
        tools = [tool.form for tool in toolbox.tools] if toolbox is not None else []
        schema = answer_schema if skills.schemas else None
        self.shield = ControlTextShield(starts, (chat, tools, schema))
        self._turns = [self._disguised(turn) for turn in chat]
        self._tools = self.shield.disguised(tools)
        self._schema = self.shield.disguised(schema)

    def variables(self) -> dict[str, Any]:
        """The template's `messages`, and `tools` and `answer_schema` if it writes them itself."""
        messages, tools = self._written(), self._tools or None
        if tools is not None and not self._skills.tools:
            text, tools = written_tools(tools, self._skills.format), None
            if messages and messages[0]["role"] == "system":
                messages[0]["content"] += "\n\n" + text
            else:
                messages.insert(0, {"role": "system", "content": text})
        schema = {} if self._schema is None else {"answer_schema": self._schema}
        return {"messages": messages, "tools": tools, **schema}

    def _arguments(self, message: ChatMessage) -> list[str | Mapping[str, Any]]:
        """Arguments must be decoded before they are disguised: escapes in JSON spell any character."""
        style = self._skills.calls
        return [call.decoded if style is not None and style.decoded else call.arguments for call in message.tool_calls]

    def _disguised(self, turn: _Turn) -> _Turn:
        disguised = self.shield.disguised(turn)
        if turn.message.role != "assistant":
            return disguised
        own = self.shield.own_words(turn.message.content)
        return replace(disguised, message=replace(disguised.message, content=own))

    def _written(self) -> list[Message]:
        written: list[Message] = []
        outputs: list[str] | None = None
        for turn in self._turns:
            message = turn.message
            if message.role == "tool" and outputs is not None:
                # The template cannot write calls, so their results become the next message of the user.
                outputs.append(message.content)
                said = {"role": "user", "content": self._skills.format.outputs(outputs)}
                written[-1:] = [said] if len(outputs) > 1 else [*written[-1:], said]
                continue
            outputs = [] if message.tool_calls and self._skills.calls is None else None
            written += self._said(turn)
        return written

    def _said(self, turn: _Turn) -> list[Message]:
        message = turn.message
        fields = {"tool_call_id": message.tool_call_id, "name": message.name}
        fields |= dict.fromkeys(REASONING_NAMES, message.reasoning)
        said = {name: value for name, value in fields.items() if value is not None}
        if not message.tool_calls:
            role = "system" if message.role == "developer" and not self._skills.developers else message.role
            return [{"role": role, "content": message.content, **said}]
        if self._skills.calls is None:
            content = message.content + self._skills.format.calls(message.tool_calls)
            return [{"role": message.role, "content": content, **said}]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in zip(message.tool_calls, turn.arguments, strict=True)
        ]
        return self._skills.calls.turn(message.content, calls, **said)


def in_order_of_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages, with each turn's results in the order of its calls: the model matches results to calls by order
    alone.

    Raises InvalidRequest for the result of a call that was not made.
    """
    ordered: list[ChatMessage] = []
    places: dict[str, int] = {}
    results: list[ChatMessage] = []
    for index, message in enumerate(messages):
        if message.role != "tool":
            ordered += _sorted_results(results, places)
            places = {call.id: place for place, call in enumerate(message.tool_calls)}
            results = []
            ordered.append(message)
            continue
        if message.tool_call_id is not None and message.tool_call_id not in places:
            complaint = f"no call before it has the id {message.tool_call_id!r}"
            raise InvalidRequest(complaint, field=f"messages[{index}].tool_call_id")
        results.append(message)
    return ordered + _sorted_results(results, places)


def _sorted_results(results: list[ChatMessage], places: Mapping[str, int]) -> list[ChatMessage]:
    if any(result.tool_call_id is None for result in results):
        return results
    return sorted(results, key=lambda result: places[result.tool_call_id or ""])

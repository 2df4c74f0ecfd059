"""Turns a client's messages and tools into the messages that a chat template gets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from msgspec import json

from gateway.control_text import ControlTextShield
from gateway.tool_format import CallForm, form_of, written_calls, written_outputs, written_tools
from gateway.tools import Tool, Toolbox, ToolCall
from mesh.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    # Calls that an assistant made.
    tool_calls: Sequence[ToolCall] = ()
    # Which call a tool's message answers; None if the client leaves that to their order.
    tool_call_id: str | None = None

    @property
    def texts(self) -> list[str]:
        """All text in the message that its client wrote."""
        return [self.content, *(text for call in self.tool_calls for text in (call.name, call.arguments))]


@dataclass(frozen=True, slots=True)
class TemplateSkills:
    """The parts of tools that a chat template writes by itself."""

    tools: bool
    calls: bool
    form: CallForm

    @classmethod
    def of(cls, source: str, variables: set[str]) -> "TemplateSkills":
        """`variables` are those that the template reads."""
        return cls("tools" in variables, "tool_calls" in source, form_of(source))


class Turns:
    """The messages of one chat for one template, with clients' text shielded."""

    def __init__(
        self, messages: Sequence[ChatMessage], toolbox: Toolbox | None, skills: TemplateSkills, starts: Sequence[str]
    ) -> None:
        tools = toolbox.tools if toolbox is not None else ()
        texts = [text for message in messages for text in message.texts]
        texts += [text for tool in tools for text in (tool.description, json.encode(tool.parameters).decode())]
        self.shield = ControlTextShield(starts, texts)
        self._messages = in_order_of_calls(messages)
        self._tools = tools
        self._skills = skills

    def variables(self) -> dict[str, Any]:
        """The template's `messages` and, if it writes tools itself, `tools`."""
        messages = self._written()
        if not self._tools:
            return {"messages": messages}
        tools = [self._shielded_tool(tool) for tool in self._tools]
        if self._skills.tools:
            return {"messages": messages, "tools": [{"type": "function", "function": asdict(each)} for each in tools]}
        text = written_tools(tools, self._skills.form)
        if messages and messages[0]["role"] == "system":
            messages[0]["content"] += "\n\n" + text
        else:
            messages.insert(0, {"role": "system", "content": text})
        return {"messages": messages}

    def _written(self) -> list[dict[str, Any]]:
        written: list[dict[str, Any]] = []
        outputs: list[str] | None = None
        for message in self._messages:
            content = self.shield.apply(message.content, own_words=message.role == "assistant")
            if message.role == "tool" and outputs is not None:
                # The template cannot write calls, so their results become the next message of the user.
                outputs.append(content)
                said = {"role": "user", "content": written_outputs(outputs)}
                written[-1:] = [said] if len(outputs) > 1 else [*written[-1:], said]
                continue
            outputs = [] if message.tool_calls and not self._skills.calls else None
            written.append(self._message(message, content))
        return written

    def _message(self, message: ChatMessage, content: str) -> dict[str, Any]:
        if not message.tool_calls:
            named = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
            return {"role": message.role, "content": content, **named}
        calls = [ToolCall(each.id, *map(self._disguised, (each.name, each.arguments))) for each in message.tool_calls]
        if not self._skills.calls:
            return {"role": message.role, "content": content + written_calls(calls, self._skills.form)}
        functions = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        # DeepSeek's templates write calls only if the content is None, not if it is empty.
        return {"role": message.role, "content": content or None, "tool_calls": functions}

    def _shielded_tool(self, tool: Tool) -> Tool:
        description, parameters = self._disguised(tool.description), self._disguised_tree(tool.parameters)
        return replace(tool, description=description, parameters=parameters)

    def _disguised_tree(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._disguised(value)
        if isinstance(value, Mapping):
            return {self._disguised(key): self._disguised_tree(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._disguised_tree(each) for each in value]
        return value

    def _disguised(self, text: str) -> str:
        return self.shield.apply(text, own_words=False)


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

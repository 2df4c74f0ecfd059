"""Turns the items of a request's input into the messages of a chat."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from msgspec import Struct

from gateway.prompts.turns import ChatMessage
from gateway.requests import validate_message_count
from gateway.responses.output import CallItem, MessageItem, OutputItem, ReasoningItem
from gateway.tools import ToolCall
from mesh.errors import InvalidRequest, MissingField, Unsupported

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_PARTS = ("reasoning_text",)

ValueT = TypeVar("ValueT")


class InputPart(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of an item; only text is taken. Other parts' fields are declared so that the error names their type, not
    an unknown field.
    """

    type: str
    text: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    image_url: Any = None
    refusal: str | None = None


class InputItem(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Any item; `type` says which fields it must have. Clients may send an answer's items back unchanged."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    # A call's arguments, as JSON.
    arguments: str | None = None
    # The result of a function call.
    output: str | list[InputPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


def items_of(given: str | list[InputItem]) -> list[InputItem]:
    return [InputItem(role="user", content=given)] if isinstance(given, str) else given


def remembered(items: Sequence[InputItem]) -> list[InputItem]:
    """The parts of items that later prompts need, for items that `messages_of` accepts. The rest may be nested so deep
    that it could be read but not written.
    """
    return [
        InputItem(
            item.type,
            role=item.role,
            content=_joined(item.content),
            call_id=item.call_id,
            name=item.name,
            arguments=item.arguments,
            output=_joined(item.output),
        )
        for item in items
    ]


def _joined(content: str | list[InputPart] | None) -> str | None:
    return "".join(part.text for part in content) if isinstance(content, list) else content


def answered(output: Sequence[OutputItem]) -> list[InputItem]:
    """The items of an answer, for requests that continue from it."""
    items = []
    for item in output:
        if isinstance(item, ReasoningItem):
            items.append(InputItem("reasoning", content="".join(part.text for part in item.content)))
        elif isinstance(item, MessageItem):
            items.append(InputItem(role="assistant", content="".join(part.text for part in item.content)))
        elif isinstance(item, CallItem):
            items.append(InputItem("function_call", call_id=item.call_id, name=item.name, arguments=item.arguments))
    return items


@dataclass(slots=True)
class _Turn:
    """What the assistant thinks, says and calls before anyone else speaks: one message."""

    thoughts: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def messages(self) -> list[ChatMessage]:
        """The message; none if the assistant neither said nor called anything."""
        if not (self.said or self.calls):
            return []
        reasoning = "".join(self.thoughts) or None
        return [ChatMessage("assistant", "\n\n".join(self.said), self.calls, reasoning=reasoning)]


def messages_of(instructions: str | None, given: str | Sequence[InputItem]) -> list[ChatMessage]:
    """The chat that these items make. Raises InvalidRequest naming the item and its field."""
    messages = [] if instructions is None else [ChatMessage("system", instructions)]
    if isinstance(given, str):
        return [*messages, ChatMessage("user", given)]
    validate_message_count(len(given), field="input")
    turn = _Turn()
    for index, item in enumerate(given):
        place = f"input[{index}]"
        if item.type == "function_call":
            turn.calls.append(_call(item, place))
            continue
        message = None if item.type == "reasoning" else _message(item, place)
        # Text after calls begins a new turn, and so do thoughts after anything else.
        goes_on = not (turn.said or turn.calls) if message is None else message.role == "assistant" and not turn.calls
        if not goes_on:
            messages += turn.messages()
            turn = _Turn()
        if message is None:
            turn.thoughts.append(_reasoning(item, place))
        elif message.role == "assistant":
            turn.said.append(message.content)
        else:
            messages.append(message)
    return messages + turn.messages()


def _reasoning(item: InputItem, field: str) -> str:
    """The text of a reasoning item; empty if it is hidden, as OpenAI's own is."""
    return "" if item.content is None else _text(item.content, f"{field}.content", REASONING_PARTS)


def _message(item: InputItem, field: str) -> ChatMessage:
    if item.type == "function_call_output":
        return ChatMessage("tool", _text(item.output, f"{field}.output"), (), _given(item.call_id, f"{field}.call_id"))
    if item.type != "message":
        raise Unsupported(f"items of type {item.type!r} are not supported: send messages", field=f"{field}.type")
    role = _given(item.role, f"{field}.role")
    if role not in ROLES:
        raise InvalidRequest(f"unknown role {role!r}: use one of {', '.join(ROLES)}", field=f"{field}.role")
    return ChatMessage(role, _text(item.content, f"{field}.content"))


def _call(item: InputItem, field: str) -> ToolCall:
    return ToolCall(
        _given(item.call_id, f"{field}.call_id"),
        _given(item.name, f"{field}.name"),
        _given(item.arguments, f"{field}.arguments"),
    )


def _text(content: str | list[InputPart] | None, field: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    parts = _given(content, field)
    for index, part in enumerate(parts):
        if part.type not in kinds:
            raise Unsupported(
                f"content of type {part.type!r} is not supported: send text", field=f"{field}[{index}].type"
            )
    return "".join(part.text for part in parts)


def _given(value: ValueT | None, field: str) -> ValueT:
    if value is None:
        raise MissingField(f"the field {field!r} is missing", field=field)
    return value

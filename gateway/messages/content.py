"""The messages of a request and their blocks, as messages of a chat."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

from msgspec import Raw, Struct, field

from gateway.prompts.turns import ChatMessage
from gateway.requests import validate_message_count
from gateway.tools import ToolCall
from mesh.errors import InvalidRequest, MissingField, Unsupported

ValueT = TypeVar("ValueT")


class TextBlock(Struct, forbid_unknown_fields=True):
    """A block of text. Other blocks' fields are declared so that the error names their type, not an unknown field."""

    type: str
    text: str | None = None
    # Accepted and ignored: prefixes are always cached.
    cache_control: Any = None
    citations: Any = None
    context: Any = None
    source: Any = None
    title: Any = None


class ContentBlock(TextBlock, forbid_unknown_fields=True):
    """Any block; `type` says which fields it must have. Clients may send an answer's blocks back unchanged."""

    id: str | None = None
    name: str | None = None
    # A call's arguments, a JSON object; their text is kept as it is.
    input: Raw = field(default_factory=Raw)
    caller: Any = None
    tool_use_id: str | None = None
    # The result of a function call.
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    # Reasoning, for templates that write it.
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


def messages_of(system: str | Sequence[TextBlock] | None, given: Sequence[InputMessage]) -> list[ChatMessage]:
    """The chat that these messages make. Raises InvalidRequest naming the block and its field."""
    parts = sum(1 if isinstance(message.content, str) else len(message.content) for message in given)
    validate_message_count(max(parts, len(given)), field="messages")
    messages = [] if system is None else [ChatMessage("system", _text(system, "system"))]
    for index, message in enumerate(given):
        messages += _said(message, f"messages[{index}]")
    if given and given[-1].role == "assistant":
        raise Unsupported(
            "the last message is the assistant's: going on with it is not supported",
            field=f"messages[{len(given) - 1}]",
        )
    return messages


def _said(message: InputMessage, path: str) -> Iterator[ChatMessage]:
    """The chat messages of one message. Results of calls become messages of their own, before the user's text."""
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content)
        return
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for index, block in enumerate(message.content):
        place = f"{path}.content[{index}]"
        match message.role, block.type:
            case _, "text":
                texts.append(_given(block.text, f"{place}.text"))
            case "user", "tool_result":
                yield ChatMessage("tool", _result(block, place), (), _given(block.tool_use_id, f"{place}.tool_use_id"))
            case "assistant", "tool_use":
                calls.append(_call(block, place))
            case "assistant", "thinking" | "redacted_thinking":
                # What is redacted has no text.
                thoughts.append(block.thinking or "")
            case role, kind:
                raise Unsupported(f"{role}s' blocks of type {kind!r} are not supported", field=f"{place}.type")
    if texts or calls:
        yield ChatMessage(message.role, "".join(texts), calls, reasoning="".join(thoughts) or None)


def _call(block: ContentBlock, field: str) -> ToolCall:
    try:
        # Raw input is not decoded when the body is read, so this may fail.
        arguments = bytes(block.input).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the input is not UTF-8: {error.reason}", field=f"{field}.input") from None
    return ToolCall(
        _given(block.id, f"{field}.id"),
        _given(block.name, f"{field}.name"),
        _given(arguments or None, f"{field}.input"),
    )


def _result(block: ContentBlock, field: str) -> str:
    text = "" if block.content is None else _text(block.content, f"{field}.content")
    return f"Error: {text}" if block.is_error else text


def _text(content: str | Sequence[TextBlock], field: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            place = f"{field}[{index}].type"
            raise Unsupported(f"blocks of type {block.type!r} are not supported here: send text", field=place)
    return "".join(_given(block.text, f"{field}[{index}].text") for index, block in enumerate(content))


def _given(value: ValueT | None, field: str) -> ValueT:
    if value is None:
        raise MissingField(f"the field {field!r} is missing", field=field)
    return value

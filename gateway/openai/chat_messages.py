"""The messages of OpenAI's chats."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from gateway.openai.tools import CallBody
from gateway.prompts.turns import ChatMessage
from gateway.requests import validate_message_count
from mesh.errors import InvalidRequest, MissingField, Unsupported


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message; only text is taken. Other parts' fields are declared so that the error names their type, not
    an unknown field.
    """

    type: str
    text: str | None = None
    file: Any = None
    image_url: Any = None
    input_audio: Any = None
    refusal: Any = None

    def said(self, field: str) -> str:
        if self.type != "text":
            raise InvalidRequest(f"content of type {self.type!r} is not supported: send text", field=f"{field}.type")
        if self.text is None:
            raise MissingField("the part has no text", field=f"{field}.text")
        return self.text


class Message(Struct, forbid_unknown_fields=True):
    """A message. Clients may send an answer's message back unchanged: fields without meaning for the model are
    ignored. Whether the model sees names and reasoning is its template's choice.
    """

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    name: str | None = None
    # What the assistant thought before it said this; the second is vLLM's name.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    def to_chat(self, index: int) -> ChatMessage:
        for name in ("audio", "function_call"):
            if getattr(self, name) is not None:
                raise Unsupported(f"{name} is not supported: leave it out", field=f"messages[{index}].{name}")
        content = self._text(f"messages[{index}].content")
        calls = [call.to_call() for call in self.tool_calls or ()]
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        return ChatMessage(self.role, content, calls, self.tool_call_id, self.name, reasoning)

    def _text(self, field: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            said = self.tool_calls or self.refusal or self.reasoning_content or self.reasoning
            if self.role == "assistant" and said:
                return ""
            raise MissingField("the message has no content: send text, which may be empty", field=field)
        if not self.content:
            raise InvalidRequest("content is an empty list: send text, or at least one part", field=field)
        return "".join(part.said(f"{field}[{index}]") for index, part in enumerate(self.content))


def chat_messages(given: Sequence[Message]) -> list[ChatMessage]:
    """The chat that these messages make. Raises InvalidRequest naming the message and its field."""
    validate_message_count(len(given) + sum(len(message.tool_calls or ()) for message in given), field="messages")
    return [message.to_chat(index) for index, message in enumerate(given)]

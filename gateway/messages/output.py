"""What clients of the Messages API receive: a message, its blocks, and the events that carry them."""

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnsweredThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    # A signature is for services that hide reasoning from their clients; ours is empty.
    signature: str = ""


class AnsweredText(Struct, tag_field="type", tag="text"):
    text: str
    citations: list[Any] = []


class DirectCaller(Struct, tag_field="type", tag="direct", frozen=True):
    """The caller is the model itself, not a program that Anthropic runs."""


class ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    # A JSON object, as the model wrote it.
    input: Raw
    caller: DirectCaller = DirectCaller()


OutputBlock = AnsweredThinking | AnsweredText | ToolUse


class ThinkingDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """Token counts. Cached tokens of the prompt are counted apart from the others; counts that we lack are null."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: ThinkingDetails
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class AnsweredMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    container: None = None
    stop_details: None = None
    # Whether drafts were taken in place of tokens that the seed gives, so that the seed holds at best effort only.
    relaxed: bool | UnsetType = UNSET


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: AnsweredMessage


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: OutputBlock


class ThinkingBlockDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class TextBlockDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class JsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: ThinkingBlockDelta | TextBlockDelta | JsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(Struct):
    stop_reason: StopReason
    stop_sequence: str | None
    container: None = None
    stop_details: None = None
    relaxed: bool | UnsetType = UNSET


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: Stop
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class FailureDetail(Struct):
    type: str
    message: str
    # As in OpenAI's errors; Anthropic's have no such field.
    param: str | None = None


class Failure(Struct, tag_field="type", tag="error"):
    error: FailureDetail
    request_id: str | None = None


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Failure


class TokenCount(Struct):
    input_tokens: int


def event_name(event: Any) -> str:
    return str(event.__struct_config__.tag)

"""What clients of the Responses API receive: the response, its items, and the events that carry them."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.openai.answer_bodies import TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[Any] = []


class MessageItem(Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class CallItem(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    # The arguments, as JSON.
    arguments: str
    status: Status


OutputItem = ReasoningItem | MessageItem | CallItem


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class Settings(Struct, kw_only=True):
    """What a request asked for, as its response repeats it."""

    instructions: str | None
    tools: list[Any]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    prompt_cache_key: str | None
    safety_identifier: str | None
    user: str | None
    background: bool = False
    previous_response_id: str | None = None
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"


class Response(Settings, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    # Unix times in seconds.
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "cancelled"]
    model: str
    output: list[OutputItem]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    # Set if drafts were taken in place of tokens that the seed gives, so that the seed is best effort.
    relaxed: bool | UnsetType = UNSET


class Deleted(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class _Event(Struct, tag_field="type", kw_only=True):
    # Numbers the events of the stream from 0 on.
    sequence_number: int = 0


class Created(_Event, tag="response.created", kw_only=True):
    response: Response


class InProgress(_Event, tag="response.in_progress", kw_only=True):
    response: Response


class Completed(_Event, tag="response.completed", kw_only=True):
    response: Response


class Incomplete(_Event, tag="response.incomplete", kw_only=True):
    response: Response


class ItemAdded(_Event, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ItemDone(_Event, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class _PlacedEvent(_Event):
    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(_PlacedEvent, tag="response.content_part.added", kw_only=True):
    part: ReasoningText | OutputText


class PartDone(_PlacedEvent, tag="response.content_part.done", kw_only=True):
    part: ReasoningText | OutputText


class ReasoningDelta(_PlacedEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(_PlacedEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class TextDelta(_PlacedEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(_PlacedEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = []


class ArgumentsDelta(_Event, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str


class Failed(_Event, tag="error", kw_only=True):
    """An error that ends a stream. Its fields are both at the top level, as OpenAI documents, and nested, where
    OpenAI's clients look for them.
    """

    code: str
    message: str
    param: str | None
    error: Any


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | ReasoningDelta
    | ReasoningDone
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | Failed
)

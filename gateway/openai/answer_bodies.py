"""What OpenAI's clients read, field by field."""

from typing import Generic, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from gateway.openai.tools import CallBody, CallDelta


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    tokens: list[str]
    # None for a prompt's first token, which nothing stands before.
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(Struct):
    logprob: float
    # The token's place among all by probability, from 1 on.
    rank: int
    decoded_token: str


# By token id, at each position.
PromptLogprobsBody = list[dict[str, PromptTokenLogprob] | None]


class ChatMessageBody(Struct):
    # None if the answer is calls of tools alone.
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    # Models of ours refuse in plain words.
    refusal: None = None


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChoice(Struct):
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    index: int = 0
    token_ids: list[int] | UnsetType = UNSET
    # With finish_reason, if drafts were taken in place of tokens that the seed gives: it is best effort then.
    relaxed: bool | UnsetType = UNSET


class ChatChunkChoice(Struct):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    token_ids: list[int] | UnsetType = UNSET
    # With finish_reason, if drafts were taken in place of tokens that the seed gives: it is best effort then.
    relaxed: bool | UnsetType = UNSET


class CompletionChoice(Struct):
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    token_ids: list[int] | UnsetType = UNSET
    # With finish_reason, if drafts were taken in place of tokens that the seed gives: it is best effort then.
    relaxed: bool | UnsetType = UNSET
    # If the client asked for them.
    prompt_logprobs: PromptLogprobsBody | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT", ChatChoice, ChatChunkChoice, CompletionChoice)


class ResponseBody(Struct, Generic[ChoiceT]):
    """A whole answer, or one chunk of it: they differ in `object` and in their choices."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    # If the client asked for usage: null in every chunk but the last. Otherwise absent.
    usage: UsageBody | UnsetType | None = UNSET
    # A chat has them, if the client asked for them.
    prompt_logprobs: PromptLogprobsBody | UnsetType = UNSET


class ModelBody(Struct):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "deepmesh"


class ModelList(Struct):
    data: list[ModelBody]
    object: Literal["list"] = "list"


class Version(Struct):
    version: str


class Health(Struct):
    status: str


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    # Each token by itself, if the client asked for them.
    token_strs: list[str] | None = None


class Detokenized(Struct):
    prompt: str


class ErrorDetail(Struct):
    message: str
    type: str
    code: str
    param: str | None = None


class ErrorBody(Struct):
    error: ErrorDetail

"""What OpenAI's clients receive, field by field."""

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
    # None for a prompt's first token, which has nothing before it.
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(Struct):
    logprob: float
    # The token's rank by probability among all tokens, from 1 on.
    rank: int
    decoded_token: str


# One entry per position, by token id.
PromptLogprobsBody = list[dict[str, PromptTokenLogprob] | None]


class ChatMessageBody(Struct):
    # None if the answer consists of tool calls alone.
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    # Always null: our models refuse in plain text.
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
    # Set with finish_reason if drafts were taken in place of tokens that the seed gives, so that the seed is best
    # effort.
    relaxed: bool | UnsetType = UNSET


class ChatChunkChoice(Struct):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    token_ids: list[int] | UnsetType = UNSET
    # Set with finish_reason if drafts were taken in place of tokens that the seed gives, so that the seed is best
    # effort.
    relaxed: bool | UnsetType = UNSET


class CompletionChoice(Struct):
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    index: int = 0
    token_ids: list[int] | UnsetType = UNSET
    # Set with finish_reason if drafts were taken in place of tokens that the seed gives, so that the seed is best
    # effort.
    relaxed: bool | UnsetType = UNSET
    # Set if the client asked for them.
    prompt_logprobs: PromptLogprobsBody | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT", ChatChoice, ChatChunkChoice, CompletionChoice)


class ResponseBody(Struct, Generic[ChoiceT]):
    """A whole answer, or one chunk of it: they differ in `object` and in the type of their choices."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    # If the client asked for usage: null in every chunk but the last. Otherwise absent.
    usage: UsageBody | UnsetType | None = UNSET
    # Set for a chat if the client asked for them.
    prompt_logprobs: PromptLogprobsBody | UnsetType = UNSET


class ModelBody(Struct):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "deepmesh"
    # How tokens are drawn where a request says nothing, if the checkpoint says so.
    sampling_defaults: dict[str, float] | UnsetType = UNSET


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
    # The text of each token, if the client asked for it.
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

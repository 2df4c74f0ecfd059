"""What OpenAI's clients send, and what of it we take."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gateway.chat import ChatMessage
from gateway.intake import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from mesh.errors import InvalidRequest

# OpenAI's own defaults.
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16
MAX_PROBLEMS_SHOWN = 3

# Features that we lack, with the values that ask for nothing. Every other unknown key is harmless and ignored, since
# clients send many.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "audio": (None,),
        "best_of": (None, 1),
        "echo": (None, False),
        "frequency_penalty": (None, 0),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "logit_bias": (None, {}),
        "min_p": (None, 0),
        "min_tokens": (None, 0),
        "modalities": (None, ["text"]),
        "n": (None, 1),
        "prediction": (None,),
        "presence_penalty": (None, 0),
        "repetition_penalty": (None, 1),
        "response_format": (None, {"type": "text"}),
        "suffix": (None, ""),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "web_search_options": (None,),
    }
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationBody(BaseModel, ABC):
    """What both endpoints take. Types are strict: "5" is no number."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    # -1 asks for all tokens, as 0 does.
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # Report token ids beside the text.
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _asks_for_what_we_have(self) -> Self:
        for key, value in (self.model_extra or {}).items():
            if value not in UNSUPPORTED.get(key, (value,)):
                raise InvalidRequest(f"{key} is not supported: leave it out", field=key)
        return self

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def streams_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @abstractmethod
    def ask(self, request_id: str) -> Ask:
        """The same in the gateway's terms. Raises InvalidRequest."""

    def _ask(self, request_id: str, prompt: Prompt, top_logprobs: int | None, max_tokens: int | None) -> Ask:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Ask(
            request_id=request_id,
            model=self.model,
            prompt=prompt,
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            seed=self.seed,
            top_logprobs=top_logprobs,
            max_tokens=max_tokens,
            stop_strings=tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    text: str = ""


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None

    def to_chat(self, index: int) -> ChatMessage:
        if self.tool_calls:
            raise InvalidRequest("tool calls are not supported", field=f"messages[{index}].tool_calls")
        parts = self.content if isinstance(self.content, list) else [ContentPart(type="text", text=self.content or "")]
        for part in parts:
            if part.type != "text":
                field = f"messages[{index}].content"
                raise InvalidRequest(f"content of type {part.type!r} is not supported: send text", field=field)
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, "".join(part.text for part in parts))


class TemplateOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    thinking: bool | None = None


class ChatCompletionBody(GenerationBody):
    messages: list[Message]
    chat_template_kwargs: TemplateOptions | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def ask(self, request_id: str) -> Ask:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
        thinking = self.chat_template_kwargs.thinking if self.chat_template_kwargs is not None else None
        prompt = ChatPrompt([message.to_chat(index) for index, message in enumerate(self.messages)], thinking)
        top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._ask(request_id, prompt, top_logprobs, max_tokens)


class CompletionBody(GenerationBody):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None

    def ask(self, request_id: str) -> Ask:
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._ask(request_id, self._one_prompt(), self.logprobs, max_tokens)

    def _one_prompt(self) -> Prompt:
        if isinstance(self.prompt, str):
            return TextPrompt(self.prompt)
        token_ids = [entry for entry in self.prompt if isinstance(entry, int)]
        if len(token_ids) == len(self.prompt):
            return TokenPrompt(token_ids)
        if len(self.prompt) > 1:
            raise InvalidRequest(f"prompt holds {len(self.prompt)} prompts: send one a request", field="prompt")
        only = self.prompt[0]
        return TextPrompt(only) if isinstance(only, str) else TokenPrompt(cast(list[int], only))


BodyT = TypeVar("BodyT", bound=GenerationBody)


def parse(kind: type[BodyT], body: bytes) -> BodyT:
    """Raises InvalidRequest naming the first field that is wrong, for malformed JSON too."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        shown = [f"{_path(problem['loc'])}{problem['msg']}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
        first = problems[0]["loc"]
        raise InvalidRequest("; ".join(shown), field=str(first[0]) if first else None) from error


def _path(location: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, location))}: " if location else ""

"""The requests of OpenAI's clients.

Decoded straight into these types: a body of 16 MiB is never held as a tree of objects as well.
"""

from abc import abstractmethod
from typing import Any, cast

from msgspec import Struct

from gateway.chat import ChatMessage
from gateway.intake import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from gateway.openai.sampling import SamplingFields
from mesh.errors import InvalidRequest

# OpenAI's own default.
DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    # OpenAI pads chunks against guesses from their lengths; we do not.
    include_obfuscation: bool | None = None


class GenerationBody(SamplingFields, kw_only=True):
    """The fields that both endpoints have. Types are strict: "5" is no number."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # Report token ids beside the text.
    return_token_ids: bool | None = None

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
            sampling=self.sampling(top_logprobs),
            max_tokens=max_tokens,
            stop_strings=tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message. Only text is taken; the fields of other parts are known so that their type is refused."""

    type: str
    text: str = ""
    file: Any = None
    image_url: Any = None
    input_audio: Any = None
    refusal: Any = None


class Message(Struct, forbid_unknown_fields=True):
    """An answer may come back as it was given: what else it had beside its content is taken, and not used."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    def to_chat(self, index: int) -> ChatMessage:
        if self.tool_calls:
            raise InvalidRequest("tool calls are not supported", field=f"messages[{index}].tool_calls")
        parts = self.content if isinstance(self.content, list) else [ContentPart("text", self.content or "")]
        for part in parts:
            if part.type != "text":
                field = f"messages[{index}].content"
                raise InvalidRequest(f"content of type {part.type!r} is not supported: send text", field=field)
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, "".join(part.text for part in parts))


class TemplateOptions(Struct, forbid_unknown_fields=True):
    thinking: bool | None = None


class ChatCompletionBody(GenerationBody, kw_only=True):
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


class CompletionBody(GenerationBody, kw_only=True):
    # Text, token ids, or a list of one of either.
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None

    def ask(self, request_id: str) -> Ask:
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._ask(request_id, self._one_prompt(), self.logprobs, max_tokens)

    def _one_prompt(self) -> Prompt:
        if isinstance(self.prompt, str):
            return TextPrompt(self.prompt)
        kinds = set(map(type, self.prompt))
        if kinds <= {int}:
            return TokenPrompt(cast(list[int], self.prompt))
        if len(self.prompt) > 1:
            raise InvalidRequest(f"prompt holds {len(self.prompt)} prompts: send one a request", field="prompt")
        only = self.prompt[0]
        return TextPrompt(only) if isinstance(only, str) else TokenPrompt(cast(list[int], only))

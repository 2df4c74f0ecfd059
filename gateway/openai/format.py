"""Deltas in the forms of OpenAI's two endpoints."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation import Delta, Finish, Usage
from gateway.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    PromptDetails,
    ResponseBody,
    TokenLogprob,
    TopLogprob,
    UsageBody,
)
from gateway.tokenizer import Tokenizer
from mesh.domain.outputs import FinishReason, Logprobs

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # OpenAI has no word for it; its clients accept an answer that stopped.
    FinishReason.CANCELLED: "stop",
}
Choices = list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    id: str
    # Unix time in seconds.
    created: int
    model: str
    with_token_ids: bool
    with_usage: bool


@dataclass(slots=True)
class Answer:
    """All deltas of one generation."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


class Format(ABC):
    """One answer in one endpoint's form; encodes to JSON."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    PREFIX: ClassVar[str]

    def __init__(self, head: Head, tokenizer: Tokenizer | None) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()

    def opening(self) -> bytes | None:
        """The chunk before the first delta, or None if the form has none."""
        return None

    def chunk(self, delta: Delta) -> bytes:
        return self._chunk(self._delta_choices(delta))

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk after the last delta, for clients that ask for usage."""
        return self._body(self.CHUNK, [], usage_body(usage))

    def whole(self, answer: Answer, finish: Finish) -> bytes:
        return self._body(self.WHOLE, self._whole_choices(answer, finish), usage_body(finish.usage))

    @abstractmethod
    def _delta_choices(self, delta: Delta) -> Choices: ...

    @abstractmethod
    def _whole_choices(self, answer: Answer, finish: Finish) -> Choices: ...

    def _chunk(self, choices: Choices) -> bytes:
        return self._body(self.CHUNK, choices, None if self._head.with_usage else UNSET)

    def _body(self, kind: str, choices: Choices, usage: UsageBody | UnsetType | None) -> bytes:
        head = self._head
        return self._encoder.encode(
            ResponseBody(f"{self.PREFIX}-{head.id}", kind, head.created, head.model, choices, usage)
        )

    def _token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._head.with_token_ids else UNSET

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        """A token's text and bytes, or its number if the model has no tokenizer."""
        if self._tokenizer is None:
            return f"token_id:{token_id}", []
        text = self._tokenizer.token_text(token_id)
        return text, list(self._tokenizer.token_bytes(token_id))


class ChatFormat(Format):
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"
    PREFIX = "chatcmpl"

    def opening(self) -> bytes | None:
        return self._chunk([ChatChunkChoice(ChatDelta(role="assistant", content=""))])

    def _delta_choices(self, delta: Delta) -> list[ChatChunkChoice]:
        return [
            ChatChunkChoice(
                ChatDelta(content=delta.content or UNSET, reasoning_content=delta.reasoning or UNSET),
                self._logprobs(delta.token_ids, delta.logprobs),
                _FINISH_REASONS[delta.finish.reason] if delta.finish is not None else None,
                token_ids=self._token_ids(delta.token_ids),
            )
        ]

    def _whole_choices(self, answer: Answer, finish: Finish) -> list[ChatChoice]:
        return [
            ChatChoice(
                ChatMessageBody("".join(answer.content), "".join(answer.reasoning) or None),
                self._logprobs(answer.token_ids, answer.logprobs),
                _FINISH_REASONS[finish.reason],
                token_ids=self._token_ids(answer.token_ids),
            )
        ]

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[Logprobs]) -> ChatLogprobs | None:
        if not entries:
            return None
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            text, spelled = self._token(token_id)
            top = [TopLogprob(*self._alternative(other, logprob)) for other, logprob in entry.top]
            content.append(TokenLogprob(text, entry.logprob, spelled, top))
        return ChatLogprobs(content)

    def _alternative(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        text, spelled = self._token(token_id)
        return text, logprob, spelled


class CompletionFormat(Format):
    WHOLE = "text_completion"
    CHUNK = "text_completion"
    PREFIX = "cmpl"

    def __init__(self, head: Head, tokenizer: Tokenizer | None) -> None:
        super().__init__(head, tokenizer)
        # Characters of the tokens reported so far.
        self._offset = 0

    def _delta_choices(self, delta: Delta) -> list[CompletionChoice]:
        reason = _FINISH_REASONS[delta.finish.reason] if delta.finish is not None else None
        return [self._choice(delta.content, delta.token_ids, delta.logprobs, reason)]

    def _whole_choices(self, answer: Answer, finish: Finish) -> list[CompletionChoice]:
        text = "".join(answer.content)
        return [self._choice(text, answer.token_ids, answer.logprobs, _FINISH_REASONS[finish.reason])]

    def _choice(
        self, text: str, token_ids: Sequence[int], entries: Sequence[Logprobs], reason: str | None
    ) -> CompletionChoice:
        logprobs = self._logprobs(token_ids, entries) if entries else None
        return CompletionChoice(text, logprobs, reason, token_ids=self._token_ids(token_ids))

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[Logprobs]) -> CompletionLogprobs:
        report = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text, _ = self._token(token_id)
            report.tokens.append(text)
            report.token_logprobs.append(entry.logprob)
            report.top_logprobs.append({self._token(other)[0]: logprob for other, logprob in entry.top})
            report.text_offset.append(self._offset)
            self._offset += len(text)
        return report


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        completion_tokens_details=CompletionDetails(usage.reasoning_tokens),
    )

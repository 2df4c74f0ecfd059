"""Deltas in the forms of OpenAI's two endpoints."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.choices import Piece
from gateway.generation import Delta, Finish
from gateway.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    CompletionChoice,
    CompletionLogprobs,
    ResponseBody,
    TokenLogprob,
    TopLogprob,
    UsageBody,
)
from gateway.openai.tools import call_deltas, whole_calls
from gateway.openai.usage import UsageTally
from gateway.tokenizer import Tokenizer
from gateway.tools import ToolCallDelta
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
    # Every chunk has the usage so far.
    with_continuous_usage: bool
    choices_per_prompt: int


class StreamForm(msgspec.Struct, frozen=True):
    """How a stream's events are written, for the gateway that goes on with it."""

    head: Head
    # Or a completion.
    chat: bool


@dataclass(slots=True)
class Answer:
    """All deltas of one generation."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.finish = delta.finish
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.calls.extend(delta.calls)


class Format(ABC):
    """One answer in one endpoint's form; encodes to JSON."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    PREFIX: ClassVar[str]

    def __init__(self, head: Head, tokenizer: Tokenizer | None) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()
        self._usage = UsageTally(head.choices_per_prompt)

    def opening(self, index: int) -> bytes | None:
        """The chunk of a choice before its first delta, or None if the form has none."""
        return None

    def chunk(self, piece: Piece) -> bytes:
        self._usage.note(piece.index, piece.usage)
        return self._chunk(self._delta_choices(piece.index, piece.delta))

    def usage_chunk(self) -> bytes | None:
        """The chunk after the last delta, for clients that ask for usage."""
        if not self._head.with_usage:
            return None
        return self._body(self.CHUNK, [], self._usage.total())

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """All choices, each of which has ended."""
        for index, answer in enumerate(answers):
            assert answer.finish is not None
            self._usage.note(index, answer.finish.usage)
        return self._body(self.WHOLE, self._whole_choices(answers), self._usage.total())

    @abstractmethod
    def _delta_choices(self, index: int, delta: Delta) -> Choices: ...

    @abstractmethod
    def _whole_choices(self, answers: Sequence[Answer]) -> Choices: ...

    def _chunk(self, choices: Choices) -> bytes:
        if self._head.with_continuous_usage:
            return self._body(self.CHUNK, choices, self._usage.total())
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

    def opening(self, index: int) -> bytes | None:
        return self._chunk([ChatChunkChoice(ChatDelta(role="assistant", content=""), index=index)])

    def _delta_choices(self, index: int, delta: Delta) -> list[ChatChunkChoice]:
        return [
            ChatChunkChoice(
                ChatDelta(
                    content=delta.content or UNSET,
                    reasoning_content=delta.reasoning or UNSET,
                    tool_calls=call_deltas(delta.calls) or UNSET,
                ),
                self._logprobs(delta.token_ids, delta.logprobs),
                finish_reason(delta.finish),
                index,
                token_ids=self._token_ids(delta.token_ids),
                relaxed=relaxed(delta.finish),
            )
        ]

    def _whole_choices(self, answers: Sequence[Answer]) -> list[ChatChoice]:
        return [
            ChatChoice(
                self._message(answer),
                self._logprobs(answer.token_ids, answer.logprobs),
                finish_reason(answer.finish),
                index,
                token_ids=self._token_ids(answer.token_ids),
                relaxed=relaxed(answer.finish),
            )
            for index, answer in enumerate(answers)
        ]

    def _message(self, answer: Answer) -> ChatMessageBody:
        content, calls = "".join(answer.content), whole_calls(answer.calls)
        reasoning = "".join(answer.reasoning) or None
        return ChatMessageBody(None if calls and not content else content, reasoning, calls or UNSET)

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
        # By choice, characters of the tokens reported so far.
        self._offsets: Counter[int] = Counter()

    def _delta_choices(self, index: int, delta: Delta) -> list[CompletionChoice]:
        logprobs = self._logprobs(index, delta.token_ids, delta.logprobs)
        token_ids = self._token_ids(delta.token_ids)
        finish = delta.finish
        return [CompletionChoice(delta.content, logprobs, finish_reason(finish), index, token_ids, relaxed(finish))]

    def _whole_choices(self, answers: Sequence[Answer]) -> list[CompletionChoice]:
        return [
            CompletionChoice(
                "".join(answer.content),
                self._logprobs(index, answer.token_ids, answer.logprobs),
                finish_reason(answer.finish),
                index,
                self._token_ids(answer.token_ids),
                relaxed(answer.finish),
            )
            for index, answer in enumerate(answers)
        ]

    def _logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[Logprobs]) -> CompletionLogprobs | None:
        if not entries:
            return None
        report = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text, _ = self._token(token_id)
            report.tokens.append(text)
            report.token_logprobs.append(entry.logprob)
            report.top_logprobs.append({self._token(other)[0]: logprob for other, logprob in entry.top})
            report.text_offset.append(self._offsets[index])
            self._offsets[index] += len(text)
        return report


def finish_reason(finish: Finish | None) -> str | None:
    if finish is not None and finish.called_tools and finish.reason is FinishReason.STOP:
        return "tool_calls"
    return None if finish is None else _FINISH_REASONS[finish.reason]


def relaxed(finish: Finish | None) -> bool | UnsetType:
    return True if finish is not None and finish.relaxed else UNSET

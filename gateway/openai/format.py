"""Deltas in the forms of OpenAI's chats and completions."""

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, Self

import msgspec
from msgspec import UNSET, UnsetType

from gateway.choices import Piece
from gateway.generation import Delta, Finish
from gateway.openai.answer_bodies import (
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
from gateway.openai.errors import error_json
from gateway.openai.form import Answer, Event, Form
from gateway.openai.requests import GenerationBody
from gateway.openai.tools import call_deltas, whole_calls
from gateway.openai.usage import UsageTally
from gateway.tokenizer import Tokenizer
from mesh.domain.outputs import FinishReason, Logprobs
from mesh.errors import MeshError
from mesh.observe import new_request_id, request_id

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
    # Of a prompt's choices so many are given, the likeliest; None if all are.
    chosen_per_prompt: int | None = None
    # Log probabilities serve only to choose.
    hides_logprobs: bool = False


class StreamForm(msgspec.Struct, frozen=True):
    """How a stream's events are written, for the gateway that goes on with it."""

    head: Head
    # Or a completion.
    chat: bool


class Format(Form):
    """One answer as choices; encodes to JSON."""

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    PREFIX: ClassVar[str]

    def __init__(self, head: Head, tokenizer: Tokenizer | None) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()
        self._usage = UsageTally(head.choices_per_prompt)

    @classmethod
    def of(cls, body: GenerationBody, model: str, tokenizer: Tokenizer | None) -> Self:
        """The form of the answer to this request."""
        return cls(_head(body, model), tokenizer)

    def written(self) -> bytes:
        return msgspec.msgpack.encode(StreamForm(self._head, isinstance(self, ChatFormat)))

    def chunk(self, piece: Piece) -> Sequence[Event]:
        self._usage.note(piece.index, piece.usage)
        return (Event(self._chunk(self._delta_choices(piece.index, piece.delta))),)

    async def closing(self) -> Sequence[Event]:
        """The usage, for clients that ask for it."""
        if not self._head.with_usage:
            return ()
        return (Event(self._body(self.CHUNK, [], self._usage.total())),)

    def failure(self, error: MeshError) -> Event:
        return Event(error_json(error))

    async def whole(self, answers: Sequence[Answer]) -> bytes:
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


class ChatFormat(Format):
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"
    PREFIX = "chatcmpl"

    def opening(self, index: int) -> Sequence[Event]:
        return (Event(self._chunk([ChatChunkChoice(ChatDelta(role="assistant", content=""), index=index)])),)

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
        return ChatLogprobs(token_logprobs(self._tokenizer, zip(token_ids, entries, strict=True)))


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
        if self._head.chosen_per_prompt is not None:
            answers = likeliest(answers, self._head.choices_per_prompt, self._head.chosen_per_prompt)
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
        if not entries or self._head.hides_logprobs:
            return None
        report = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            text, _ = spelled_token(self._tokenizer, token_id)
            report.tokens.append(text)
            report.token_logprobs.append(entry.logprob)
            top = {spelled_token(self._tokenizer, other)[0]: logprob for other, logprob in entry.top}
            report.top_logprobs.append(top)
            report.text_offset.append(self._offsets[index])
            self._offsets[index] += len(text)
        return report


def token_logprobs(tokenizer: Tokenizer | None, entries: Iterable[tuple[int, Logprobs]]) -> list[TokenLogprob]:
    """Tokens with their log probabilities, and those of the likeliest ones, as chats report them."""
    report = []
    for token_id, entry in entries:
        text, spelled = spelled_token(tokenizer, token_id)
        top = []
        for other, logprob in entry.top:
            other_text, other_bytes = spelled_token(tokenizer, other)
            top.append(TopLogprob(other_text, logprob, other_bytes))
        report.append(TokenLogprob(text, entry.logprob, spelled, top))
    return report


def spelled_token(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, list[int]]:
    """A token's text and bytes, or its number if the model has no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}", []
    return tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))


def likeliest(answers: Sequence[Answer], each: int, chosen: int) -> list[Answer]:
    """Of each prompt's answers those whose tokens are the likeliest on average, best first."""
    prompts = (answers[first : first + each] for first in range(0, len(answers), each))
    return [answer for group in prompts for answer in sorted(group, key=_mean_logprob, reverse=True)[:chosen]]


def _mean_logprob(answer: Answer) -> float:
    return fmean(entry.logprob for entry in answer.logprobs) if answer.logprobs else float("-inf")


def _head(body: GenerationBody, model: str) -> Head:
    return Head(
        id=request_id.get() or new_request_id(),
        created=int(time.time()),
        model=model,
        with_token_ids=bool(body.return_token_ids),
        with_usage=body.streams_usage,
        with_continuous_usage=body.streams and body.streams_usage_continuously,
        choices_per_prompt=body.choices_per_prompt,
        chosen_per_prompt=body.chosen_per_prompt,
        hides_logprobs=body.hides_logprobs,
    )


def finish_reason(finish: Finish | None) -> str | None:
    if finish is not None and finish.called_tools and finish.reason is FinishReason.STOP:
        return "tool_calls"
    return None if finish is None else _FINISH_REASONS[finish.reason]


def relaxed(finish: Finish | None) -> bool | UnsetType:
    return True if finish is not None and finish.relaxed else UNSET

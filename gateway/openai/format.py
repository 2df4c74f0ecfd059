"""Writes deltas in the forms of OpenAI's chats and completions."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec
from msgspec import UNSET, UnsetType

from gateway.choices import Piece
from gateway.openai.answer_bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessageBody,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobsBody,
    ResponseBody,
    UsageBody,
)
from gateway.openai.completion_logprobs import CompletionReports
from gateway.openai.errors import error_json
from gateway.openai.form import Answer, Event, Form
from gateway.openai.likeliest import likeliest
from gateway.openai.requests import GenerationBody
from gateway.openai.scored_prompts import prompt_logprobs
from gateway.openai.token_texts import token_logprobs
from gateway.openai.tools import call_deltas, whole_calls
from gateway.openai.usage import UsageTally
from gateway.prompts.tokenizer import Tokenizer
from gateway.text.delta import Delta, Finish, ScoredPrompt, write_report
from mesh.domain.outputs import FinishReason, Logprobs
from mesh.errors import MeshError
from mesh.observe.spans import new_request_id, request_id

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # OpenAI has no reason for this; its clients accept an answer that stopped.
    FinishReason.CANCELLED: "stop",
}
Choices = list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]


@dataclass(frozen=True, slots=True)
class Head:
    """Values that every chunk of an answer repeats, and the options of its form."""

    id: str
    # Unix time in seconds.
    created: int
    model: str
    with_token_ids: bool
    with_usage: bool
    # Whether every chunk has the usage so far.
    with_continuous_usage: bool
    choices_per_prompt: int
    # How many of a prompt's choices are returned, the likeliest first; None returns all.
    chosen_per_prompt: int | None = None
    # Whether log probabilities are used only to choose among answers, and not shown.
    hides_logprobs: bool = False
    # Number of alternatives for each prompt token: in a report of its own, and in the logprobs of a text that begins
    # with the prompt. None means no report.
    prompt_logprobs: int | None = None
    echo_logprobs: int | None = None


class StreamForm(msgspec.Struct, frozen=True):
    """How a stream's events are written, for the gateway that resumes it."""

    head: Head
    # False for a completion.
    chat: bool


class Format(Form):
    """Writes one answer as choices, in JSON."""

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
        return await write_report(sum(answer.logprob_values for answer in answers), self._whole, answers)

    def _whole(self, answers: Sequence[Answer]) -> bytes:
        each = self._head.choices_per_prompt
        for index, answer in enumerate(answers):
            # Only the first answer to a prompt has its log probabilities; they hold for all of them.
            answer.prompt = answers[index - index % each].prompt
        for index, answer in enumerate(answers):
            assert answer.finish is not None
            self._usage.note(index, answer.finish.usage)
        choices = self._whole_choices(answers)
        # A chat has only one prompt.
        scored = self._scored(answers[0].prompt) if isinstance(self, ChatFormat) else UNSET
        return self._body(self.WHOLE, choices, self._usage.total(), scored)

    @abstractmethod
    def _delta_choices(self, index: int, delta: Delta) -> Choices: ...

    @abstractmethod
    def _whole_choices(self, answers: Sequence[Answer]) -> Choices: ...

    def _chunk(self, choices: Choices) -> bytes:
        if self._head.with_continuous_usage:
            return self._body(self.CHUNK, choices, self._usage.total())
        return self._body(self.CHUNK, choices, None if self._head.with_usage else UNSET)

    def _body(
        self,
        kind: str,
        choices: Choices,
        usage: UsageBody | UnsetType | None,
        scored: PromptLogprobsBody | UnsetType = UNSET,
    ) -> bytes:
        head = self._head
        return self._encoder.encode(
            ResponseBody(f"{self.PREFIX}-{head.id}", kind, head.created, head.model, choices, usage, scored)
        )

    def _scored(self, prompt: ScoredPrompt | None) -> PromptLogprobsBody | UnsetType:
        """The prompt's log probabilities, if the client asked for a report of their own."""
        if prompt is None or self._head.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(self._tokenizer, prompt, self._head.prompt_logprobs)

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
        self._reports = CompletionReports(tokenizer, head.echo_logprobs)
        # Scored prompts by number, and the choices whose text has begun.
        self._prompts: dict[int, ScoredPrompt] = {}
        self._begun: set[int] = set()

    def _delta_choices(self, index: int, delta: Delta) -> list[CompletionChoice]:
        logprobs = self._logprobs(
            index, delta.token_ids, delta.logprobs, delta.content, self._opening_prompt(index, delta)
        )
        self._begun.add(index)
        token_ids = self._token_ids(delta.token_ids)
        finish = delta.finish
        return [CompletionChoice(delta.content, logprobs, finish_reason(finish), index, token_ids, relaxed(finish))]

    def _whole_choices(self, answers: Sequence[Answer]) -> list[CompletionChoice]:
        if self._head.chosen_per_prompt is not None:
            answers = likeliest(answers, self._head.choices_per_prompt, self._head.chosen_per_prompt)
        return [
            CompletionChoice(
                "".join(answer.content),
                self._logprobs(index, answer.token_ids, answer.logprobs, answer.content[0], answer.prompt),
                finish_reason(answer.finish),
                index,
                self._token_ids(answer.token_ids),
                relaxed(answer.finish),
                self._scored(answer.prompt),
            )
            for index, answer in enumerate(answers)
        ]

    def logprob_values(self, piece: Piece) -> int:
        prompt = self._opening_prompt(piece.index, piece.delta)
        return super().logprob_values(piece) + (0 if prompt is None else prompt.logprobs.values)

    def _opening_prompt(self, index: int, delta: Delta) -> ScoredPrompt | None:
        """The scored prompt that belongs before a choice's first delta; None if the text does not begin with the
        prompt, or has begun.
        """
        if self._head.echo_logprobs is None or index in self._begun:
            return None
        prompt = index // self._head.choices_per_prompt
        if delta.prompt is not None:
            self._prompts[prompt] = delta.prompt
        return self._prompts.get(prompt)

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        entries: Sequence[Logprobs],
        text: str,
        prompt: ScoredPrompt | None,
    ) -> CompletionLogprobs | None:
        if not entries or self._head.hides_logprobs:
            return None
        return self._reports.of(index, token_ids, entries, text, prompt)


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
        prompt_logprobs=body.prompt_logprobs,
        echo_logprobs=body.echo_logprobs,
    )


def finish_reason(finish: Finish | None) -> str | None:
    if finish is not None and finish.called_tools and finish.reason is FinishReason.STOP:
        return "tool_calls"
    return None if finish is None else _FINISH_REASONS[finish.reason]


def relaxed(finish: Finish | None) -> bool | UnsetType:
    return True if finish is not None and finish.relaxed else UNSET

"""Writes the answers of the Messages API, whole or as events."""

from collections.abc import Iterator, Sequence
from typing import Self

import msgspec
from msgspec import UNSET, Raw

from gateway.choices import Piece
from gateway.messages.body import MessageRequest
from gateway.messages.errors import failure
from gateway.messages.output import (
    AnsweredMessage,
    AnsweredText,
    AnsweredThinking,
    BlockDelta,
    BlockStart,
    BlockStop,
    JsonDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputBlock,
    Stop,
    StopReason,
    TextBlockDelta,
    ThinkingBlockDelta,
    ThinkingDetails,
    ToolUse,
    event_name,
)
from gateway.openai.form import Answer, Event, Form
from gateway.openai.tools import whole_calls
from gateway.prompts.tokenizer import Tokenizer
from gateway.text.delta import Delta, Finish, Usage
from mesh.domain.outputs import FinishReason
from mesh.errors import MeshError
from mesh.observe.spans import new_request_id, request_id

NO_ARGUMENTS = Raw(b"{}")


class MessagesForm(Form):
    """An answer is thinking, then text, then tool calls; each may be missing."""

    API = "anthropic"
    ENDS_WITH_DONE = False

    def __init__(self, name: str, model: str) -> None:
        self._name = name
        self._model = model
        # Number of blocks begun. The last of them may still be open.
        self._blocks = 0
        self._kind: type[OutputBlock] | None = None
        self._begun = False

    @classmethod
    def of(cls, body: MessageRequest, model: str, tokenizer: Tokenizer | None) -> Self:
        return cls(request_id.get() or new_request_id(), model)

    def chunk(self, piece: Piece) -> Sequence[Event]:
        return [Event(msgspec.json.encode(event), event_name(event)) for event in self._events(piece)]

    def failure(self, error: MeshError) -> Event:
        failed = failure(error)
        return Event(msgspec.json.encode(failed), event_name(failed))

    async def whole(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        finish = answer.finish
        assert finish is not None
        delta = answer.as_delta()
        content: list[OutputBlock] = []
        if delta.reasoning:
            content.append(AnsweredThinking(delta.reasoning))
        if delta.content or not delta.calls:
            content.append(AnsweredText(delta.content))
        calls = whole_calls(delta.calls)
        content += [ToolUse(call.id, call.function.name, _arguments(call.function.arguments)) for call in calls]
        stop = _stop(finish)
        return msgspec.json.encode(
            self._message(content, finish.usage, stop.stop_reason, stop.stop_sequence, finish.relaxed)
        )

    def _events(self, piece: Piece) -> Iterator[MessageEvent]:
        if not self._begun:
            # The message starts with the first delta, which knows how much of the prompt was cached.
            self._begun = True
            yield MessageStart(self._message([], piece.usage))
        yield from self._pieces(piece.delta)
        finish = piece.delta.finish
        if finish is None:
            return
        if self._kind in (None, AnsweredThinking):
            yield from self._start(AnsweredText(""))
        yield BlockStop(self._blocks - 1)
        yield MessageDelta(_stop(finish), _usage(finish.usage))
        yield MessageStop()

    def _pieces(self, delta: Delta) -> Iterator[MessageEvent]:
        if delta.reasoning:
            if self._kind is not AnsweredThinking:
                yield from self._start(AnsweredThinking(""))
            yield BlockDelta(self._blocks - 1, ThinkingBlockDelta(delta.reasoning))
        going_on, begun = delta.ordered_calls()
        for call in going_on:
            yield BlockDelta(self._blocks - 1, JsonDelta(call.arguments))
        if delta.content:
            if self._kind is not AnsweredText:
                yield from self._start(AnsweredText(""))
            yield BlockDelta(self._blocks - 1, TextBlockDelta(delta.content))
        for call in begun:
            if call.id is not None:
                yield from self._start(ToolUse(call.id, str(call.name), NO_ARGUMENTS))
            if call.arguments:
                yield BlockDelta(self._blocks - 1, JsonDelta(call.arguments))

    def _start(self, block: OutputBlock) -> Iterator[MessageEvent]:
        """End the open block, if any, and start `block`."""
        if self._blocks:
            yield BlockStop(self._blocks - 1)
        self._blocks += 1
        self._kind = type(block)
        yield BlockStart(self._blocks - 1, block)

    def _message(
        self,
        content: list[OutputBlock],
        usage: Usage,
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
        relaxed: bool = False,
    ) -> AnsweredMessage:
        return AnsweredMessage(
            id=f"msg_{self._name}",
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=_usage(usage),
            relaxed=relaxed or UNSET,
        )


def _stop(finish: Finish) -> Stop:
    reason: StopReason = "tool_use" if finish.called_tools else "end_turn"
    if finish.reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif finish.stop_string is not None:
        reason = "stop_sequence"
    return Stop(reason, finish.stop_string, relaxed=finish.relaxed or UNSET)


def _usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        usage.prompt_tokens - usage.cached_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        ThinkingDetails(usage.reasoning_tokens),
    )


def _arguments(written: str) -> Raw:
    """A call's input, which must be a JSON object. If it is not one, for example because it was cut off, show `{}`."""
    try:
        msgspec.json.decode(written, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError):
        return NO_ARGUMENTS
    return Raw(written.encode())

"""Writes the answers of the Responses API, whole or as events."""

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, Raw

from gateway.choices import Piece
from gateway.openai.errors import error_body
from gateway.openai.form import Answer, Event, Form
from gateway.openai.sampling import DEFAULT_TEMPERATURE
from gateway.openai.token_texts import token_logprobs
from gateway.prompts.tokenizer import Tokenizer
from gateway.responses.body import ResponseRequest
from gateway.responses.items_under_way import ItemsUnderWay
from gateway.responses.output import (
    Completed,
    Created,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputDetails,
    OutputDetails,
    Response,
    ResponseEvent,
    ResponseUsage,
    Settings,
    Status,
)
from gateway.text.delta import Delta, Finish, Usage, write_report
from mesh.domain.outputs import FinishReason
from mesh.errors import InvalidRequest, MeshError

# Random, so that no client can guess an id and a repeated request id gives a new one.
ID_BYTES = 16
STATUSES: dict[FinishReason, Literal["completed", "incomplete", "cancelled"]] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.CANCELLED: "cancelled",
}


class ResponsesForm(Form):
    """Numbers its events; each carries the response as it is at that time."""

    def __init__(self, settings: Settings, name: str, model: str, tokenizer: Tokenizer | None) -> None:
        self._response = Response(
            **msgspec.structs.asdict(settings),
            id=f"resp_{name}",
            created_at=int(time.time()),
            status="in_progress",
            model=model,
            output=[],
        )
        self._tokenizer = tokenizer
        self._items = ItemsUnderWay(name)
        self._tokens = 0
        # Log probabilities of the answer so far, which its last events and the response repeat.
        self._logprob_values = 0
        self._events = 0
        self._keep: Callable[[Response], Awaitable[bool]] | None = None

    @classmethod
    def of(cls, body: ResponseRequest, model: str, tokenizer: Tokenizer | None) -> Self:
        return cls(settings_of(body), secrets.token_hex(ID_BYTES), model, tokenizer)

    def kept_by(self, keep: Callable[[Response], Awaitable[bool]]) -> Self:
        """Call `keep` with the response at its end; its result says whether the response was stored."""
        self._keep = keep
        self._response.store = True
        return self

    def so_far(self) -> bytes:
        """The response as it is now."""
        return msgspec.json.encode(self._response)

    def opening(self, index: int) -> Sequence[Event]:
        return self._numbered([Created(response=self._response), InProgress(response=self._response)])

    def chunk(self, piece: Piece) -> Sequence[Event]:
        return self._numbered(self._add(piece.delta, piece.usage))

    def logprob_values(self, piece: Piece) -> int:
        repeated = 0 if piece.delta.finish is None else self._logprob_values
        return repeated + piece.delta.logprob_values

    def failure(self, error: MeshError) -> Event:
        detail = error_body(error).error
        failed = Failed(code=detail.code, message=detail.message, param=detail.param, error=detail)
        return self._numbered([failed])[0]

    async def closing(self) -> Sequence[Event]:
        await self._settle()
        ended = Completed if self._response.status == "completed" else Incomplete
        return await write_report(self._logprob_values, self._numbered, [ended(response=self._response)])

    async def whole(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        values = answer.logprob_values
        await write_report(values, self._add_whole, answer)
        await self._settle()
        return await write_report(values, self.so_far)

    def _add_whole(self, answer: Answer) -> None:
        assert answer.finish is not None
        for _ in self._add(answer.as_delta(), answer.finish.usage):
            pass

    async def _settle(self) -> None:
        """Store the response before its client hears of the end, since the client may then ask for it."""
        ended = self._response.status in ("completed", "incomplete")
        self._response.store = self._keep is not None and ended and await self._keep(self._response)

    def _add(self, delta: Delta, usage: Usage) -> Iterator[ResponseEvent]:
        # Reasoning comes first, and its tokens have no place for log probabilities.
        reasoning = max(0, usage.reasoning_tokens - self._tokens)
        self._tokens += len(delta.token_ids)
        self._logprob_values += delta.logprob_values
        pairs = list(zip(delta.token_ids, delta.logprobs, strict=False))[reasoning:]
        yield from self._items.add(delta, token_logprobs(self._tokenizer, pairs))
        if delta.finish is not None:
            yield from self._end(delta.finish)

    def _end(self, finish: Finish) -> Iterator[ResponseEvent]:
        status = STATUSES[finish.reason]
        ended: Status = "completed" if status == "completed" else "incomplete"
        yield from self._items.end(ended)
        response = self._response
        response.status, response.output, response.usage = status, self._items.done, _usage(finish.usage)
        response.relaxed = True if finish.relaxed else UNSET
        if status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = int(time.time())

    def _numbered(self, events: "Sequence[ResponseEvent] | Iterator[ResponseEvent]") -> list[Event]:
        """The events as they are sent. Each is written at once, so that it shows the response as it is now."""
        written = []
        for event in events:
            event.sequence_number = self._events
            self._events += 1
            written.append(Event(msgspec.json.encode(event), str(event.__struct_config__.tag)))
        return written


def settings_of(body: ResponseRequest) -> Settings:
    """The settings that the response repeats. Raises InvalidRequest if they are nested too deep to be written."""
    try:
        return _settings(body)
    except RecursionError:
        raise InvalidRequest("tools, metadata, or the schema of the text are nested too deep") from None


def _settings(body: ResponseRequest) -> Settings:
    given = msgspec.to_builtins
    text: dict[str, Any] = {} if body.text is None else given(body.text)
    named = text.get("format") or {"type": "text"}
    format = {key: value for key, value in named.items() if key == "type" or named["type"] == "json_schema"}
    reasoning = body.reasoning
    return Settings(
        instructions=body.instructions,
        tools=[_written(tool) for tool in body.tools or ()],
        tool_choice="auto" if body.tool_choice is None else _written(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": _written(format), "verbosity": "medium"},
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        top_logprobs=body.top_logprobs or 0,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        previous_response_id=body.previous_response_id,
        metadata={key: _written(value) for key, value in (body.metadata or {}).items()},
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        user=body.user,
    )


def _written(value: Any) -> Raw:
    """JSON of `value`, written before the answer begins: a value at the depth limit would be too deep inside an
    event.
    """
    return Raw(msgspec.json.encode(value))


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        InputDetails(usage.cached_tokens),
        OutputDetails(usage.reasoning_tokens),
    )

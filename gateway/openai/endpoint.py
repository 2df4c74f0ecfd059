"""One of OpenAI's two generating endpoints, as an ASGI application: whole answers, or server-sent events."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.choices import Choices, Piece, open_choices
from gateway.gateway import Gateway
from gateway.openai.body import ClientGone, read_body, while_connected
from gateway.openai.errors import error_json, error_response
from gateway.openai.format import Answer, ChatFormat, Format, Head, StreamForm
from gateway.openai.parsing import parse
from gateway.openai.requests import GenerationBody
from gateway.tokenizer import Tokenizer
from mesh.errors import MeshError, ShuttingDown
from mesh.interceptors import MAX_REQUEST_ID_CHARACTERS, REQUEST_ID_KEY
from mesh.observe import new_request_id, request_id
from mesh.tracing import TRACEPARENT_KEY, TraceContext, trace_context

STREAM_HEADER = "x-deepmesh-stream"
IGNORED_FIELDS_HEADER = "x-deepmesh-ignored-fields"
MAX_HEADER_CHARACTERS = 1024
# In UTF-8: they stand only in strings.
LINE_ENDS = tuple((character.encode(), b"\\u%04x" % ord(character)) for character in "\u0085\u2028\u2029")

_log = logging.getLogger("deepmesh.gateway")


class Endpoint:
    """`body_type` reads requests, `format_type` writes answers."""

    def __init__(
        self,
        gateway: Gateway,
        body_type: type[GenerationBody],
        format_type: Callable[[Head, Tokenizer | None], Format],
    ) -> None:
        self._gateway = gateway
        self._body_type = body_type
        self._format_type = format_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with answering(self._gateway, scope, receive, send) as (headers, reply):
            await self._answer(headers, receive, reply)

    async def _answer(self, headers: Headers, receive: Receive, reply: "Reply") -> None:
        tenant = self._gateway.tenants.authenticate(headers.get("authorization"))
        http = self._gateway.config.http
        content = await read_body(receive, http.body_bytes, http.body_seconds)
        parsed = parse(self._body_type, content, ignore_unknown=http.unknown_fields == "ignore")
        del content
        body = parsed.body
        body.refuse()
        reply.note_ignored(parsed.ignored)
        asks = body.asks(request_id.get() or new_request_id())
        choices_per_prompt = body.choices_per_prompt
        head = _head(body, self._gateway.catalog.resolve(body.model))
        form = self._format_type(head, self._gateway.catalog.text(head.model).tokenizer)
        if body.streams:
            written = msgspec.msgpack.encode(StreamForm(head, isinstance(form, ChatFormat)))
            asks = [replace(ask, written=written) for ask in asks]
        opened = open_choices(self._gateway, asks, choices_per_prompt, tenant, "openai")
        async with while_connected(receive), opened as choices:
            # Errors of admission come before the first delta, while there is still a status to send them with.
            first = await choices.next()
            answer = stream_events if body.streams else self._whole
            await answer(form, choices, len(asks) * choices_per_prompt, first, reply)

    async def _whole(self, form: Format, choices: Choices, count: int, first: Piece, reply: "Reply") -> None:
        answers, piece = [Answer() for _ in range(count)], first
        while True:
            answers[piece.index].add(piece.delta)
            count -= piece.delta.finish is not None
            if not count:
                break
            piece = await choices.next()
        await reply.json(form.whole(answers))


@asynccontextmanager
async def answering(
    gateway: Gateway, scope: Scope, receive: Receive, send: Send
) -> AsyncIterator[tuple[Headers, "Reply"]]:
    """A call with its id and its trace: its headers, and where its answer goes. An error in it is answered."""
    headers = Headers(scope=scope)
    request_id.set(accepted_request_id(headers.get(REQUEST_ID_KEY)))
    trace_context.set(TraceContext.parse(headers.get(TRACEPARENT_KEY)))
    gateway.sampler.begin()
    reply = Reply(scope, receive, send)
    try:
        yield headers, reply
    except ClientGone:
        _log.debug("client gone")
    except MeshError as error:
        await reply.fail(error)


async def stream_events(
    form: Format, choices: Choices, count: int, first: Piece, reply: "Reply", opens: bool = True
) -> None:
    """opens: the answer begins with them; otherwise the client has its first part."""
    token = choices.stream_token
    reply.note_stream(token)
    await reply.start_events()
    for index in range(count if opens else 0):
        if (opening := form.opening(index)) is not None:
            await reply.event(opening)
    piece = first
    while True:
        await reply.event(form.chunk(piece), piece.delta.position if token else None)
        count -= piece.delta.finish is not None
        if not count:
            break
        piece = await choices.next()
    if (usage := form.usage_chunk()) is not None:
        await reply.event(usage)
    await reply.end_events()


def _head(body: GenerationBody, model: str) -> Head:
    return Head(
        id=request_id.get() or new_request_id(),
        created=int(time.time()),
        model=model,
        with_token_ids=bool(body.return_token_ids),
        with_usage=body.streams_usage,
        with_continuous_usage=body.streams and body.streams_usage_continuously,
        choices_per_prompt=body.choices_per_prompt,
    )


class Reply:
    """The response to one request: JSON, or events once `start_events` was called."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started = False
        self._headers = {REQUEST_ID_KEY: request_id.get() or ""}

    def note_ignored(self, fields: Sequence[str]) -> None:
        """Name the fields of the request that were left out in a header of the response."""
        if fields:
            self._headers[IGNORED_FIELDS_HEADER] = header_text(", ".join(fields))

    def note_stream(self, token: str) -> None:
        """Name the stream in a header, if its client may go on with it."""
        if token:
            self._headers[STREAM_HEADER] = token

    async def json(self, body: bytes) -> None:
        await self._respond(Response(body, media_type="application/json"))

    async def fail(self, error: MeshError) -> None:
        """The error as the response, or as the last event of one that has begun."""
        if self._started:
            await self.event(error_json(error))
            if isinstance(error, ShuttingDown):
                # Clients that know only this for an end must not take it for a broken connection.
                await self.end_events()
                return
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self._respond(error_response(error))

    async def start_events(self) -> None:
        self._started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # Proxies that buffer would hold tokens back.
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in self._headers.items()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, data: bytes, position: int | None = None) -> None:
        """position: the event's id."""
        name = b"" if position is None else b"id: %d\n" % position
        body = name + b"data: " + on_one_line(data) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _respond(self, response: Response) -> None:
        response.headers.update(self._headers)
        await response(self._scope, self._receive, self._send)


def on_one_line(data: bytes) -> bytes:
    """JSON in which the characters that many clients take for the end of a line are escaped."""
    for character, escaped in LINE_ENDS:
        data = data.replace(character, escaped)
    return data


def accepted_request_id(given: str | None) -> str:
    """The client's id if it is short printable ASCII, as metadata and logs need it, or else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return new_request_id()


def header_text(text: str) -> str:
    """Text of a client's as a header may carry it: printable ASCII, and not too much of it."""
    printable = (character if character.isascii() and character.isprintable() else "?" for character in text)
    return "".join(printable)[:MAX_HEADER_CHARACTERS]

"""A generating endpoint, as an ASGI application. It answers with whole answers or server-sent events."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.choices import Choices, Piece, open_choices
from gateway.gateway import Gateway
from gateway.openai.body import ClientGone, read_body, while_connected
from gateway.openai.errors import error_response
from gateway.openai.form import Answer, Event, Form
from gateway.openai.parsing import parse
from gateway.openai.request_body import RequestBody
from gateway.prompts.tokenizer import Tokenizer
from gateway.tenants import Tenant
from gateway.text.delta import write_report
from mesh.errors import MeshError, ShuttingDown
from mesh.observe.spans import new_request_id, request_id
from mesh.observe.tracing import TRACEPARENT_KEY, TraceContext, trace_context
from mesh.rpc.interceptors import MAX_REQUEST_ID_CHARACTERS, REQUEST_ID_KEY

STREAM_HEADER = "x-deepmesh-stream"
IGNORED_FIELDS_HEADER = "x-deepmesh-ignored-fields"
MAX_HEADER_CHARACTERS = 1024
# Encoded in UTF-8. JSON has these characters only inside strings.
LINE_ENDS = tuple((character.encode(), b"\\u%04x" % ord(character)) for character in "\u0085\u2028\u2029")

_log = logging.getLogger("deepmesh.gateway")

BodyT = TypeVar("BodyT", bound=RequestBody)


class Endpoint(Generic[BodyT]):
    """`body_type` reads requests. `form_of` gives the form in which an answer to a request is written. `refusal` writes
    an error that comes before the answer.
    """

    def __init__(
        self,
        gateway: Gateway,
        body_type: type[BodyT],
        form_of: Callable[[BodyT, str, Tokenizer | None], Form],
        refusal: Callable[[MeshError], Response] = error_response,
    ) -> None:
        self._gateway = gateway
        self._body_type = body_type
        self._form_of = form_of
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with answering(self._gateway, scope, receive, send, self._refusal) as (headers, reply):
            await self._answer(headers, receive, reply)

    async def _answer(self, headers: Headers, receive: Receive, reply: "Reply") -> None:
        tenant = self._gateway.tenants.authenticate(credential(headers))
        http = self._gateway.config.http
        content = await read_body(self._gateway, headers, receive)
        parsed = parse(self._body_type, content, ignore_unknown=http.unknown_fields == "ignore")
        parsed.body.refuse()
        parsed.body.take(parsed.content)
        reply.note_ignored(parsed.ignored)
        parsed.body.default_to(self._gateway.catalog.sampling_defaults(parsed.body.model))
        body = await self._completed(parsed.body, tenant)
        del content, parsed
        asks = body.asks(request_id.get() or new_request_id())
        choices_per_prompt = body.choices_per_prompt
        model = self._gateway.catalog.resolve(body.model)
        form = self._form(body, tenant, model, self._gateway.catalog.text(model).tokenizer)
        count = len(asks) * choices_per_prompt
        # Streams of several answers cannot be resumed, since they have no common position; workers need not keep them.
        if body.streams and count == 1:
            asks = [replace(ask, written=form.written()) for ask in asks]
        opened = open_choices(self._gateway, asks, choices_per_prompt, tenant, form.API)
        async with while_connected(receive), opened as choices:
            # Wait for the first delta before the status is sent, so that an error of admission can still set the
            # status.
            first = await choices.next()
            answer = stream_events if body.streams else self._whole
            await answer(form, choices, count, first, reply)

    async def _whole(self, form: Form, choices: Choices, count: int, first: Piece, reply: "Reply") -> None:
        answers, piece = [Answer() for _ in range(count)], first
        while True:
            answers[piece.index].add(piece.delta)
            count -= piece.delta.finish is not None
            if not count:
                break
            piece = await choices.next()
        await reply.json(await form.whole(answers))

    async def _completed(self, body: BodyT, tenant: Tenant) -> BodyT:
        """The request, with everything that it refers to filled in."""
        return body

    def _form(self, body: BodyT, tenant: Tenant, model: str, tokenizer: Tokenizer | None) -> Form:
        return self._form_of(body, model, tokenizer)


@asynccontextmanager
async def answering(
    gateway: Gateway,
    scope: Scope,
    receive: Receive,
    send: Send,
    refusal: Callable[[MeshError], Response] = error_response,
) -> AsyncIterator[tuple[Headers, "Reply"]]:
    """Surrounds one call: sets its request id and trace, yields its headers and its reply, and answers with an error if
    one is raised.
    """
    headers = Headers(scope=scope)
    request_id.set(accepted_request_id(headers.get(REQUEST_ID_KEY)))
    trace_context.set(TraceContext.parse(headers.get(TRACEPARENT_KEY)))
    gateway.sampler.begin()
    reply = Reply(scope, receive, send, refusal)
    try:
        yield headers, reply
    except ClientGone:
        _log.debug("client gone")
    except MeshError as error:
        await reply.fail(error)


async def stream_events(
    form: Form, choices: Choices, count: int, first: Piece, reply: "Reply", opens: bool = True
) -> None:
    """opens: whether the answer begins here; if not, the client has its first part already."""
    token = choices.stream_token
    reply.note_stream(token)
    await reply.start_events(form)
    for index in range(count if opens else 0):
        await reply.events(form.opening(index))
    piece = first
    while True:
        events = await write_report(form.logprob_values(piece), form.chunk, piece)
        await reply.events(events, piece.delta.position if token else None)
        count -= piece.delta.finish is not None
        if not count:
            break
        piece = await choices.next()
    await reply.events(await form.closing())
    await reply.end_events()


def credential(headers: Headers) -> str | None:
    """A client's credential: OpenAI's clients send `authorization`, Anthropic's `x-api-key`."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (key and f"Bearer {key}")


class Reply:
    """The response to one request: JSON, or events once `start_events` was called."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, refusal: Callable[[MeshError], Response] = error_response
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._refusal = refusal
        # The form of the events, once they have begun; None before.
        self._form: Form | None = None
        self._headers = {REQUEST_ID_KEY: request_id.get() or ""}

    def note_ignored(self, fields: Sequence[str]) -> None:
        """Name the request's ignored fields in a header of the response."""
        if fields:
            self._headers[IGNORED_FIELDS_HEADER] = header_text(", ".join(fields))

    def note_stream(self, token: str) -> None:
        """Name the stream in a header, if the client can resume it."""
        if token:
            self._headers[STREAM_HEADER] = token

    async def json(self, body: bytes) -> None:
        await self._respond(Response(body, media_type="application/json"))

    async def fail(self, error: MeshError) -> None:
        """Send the error as the response, or as the last event if events have begun."""
        if self._form is None:
            await self._respond(self._refusal(error))
            return
        await self.events((self._form.failure(error),))
        if isinstance(error, ShuttingDown):
            # Clients that know no other end must not mistake this one for a broken connection.
            await self.end_events()
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def start_events(self, form: Form) -> None:
        self._form = form
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # Keeps proxies from buffering, which would delay tokens.
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in self._headers.items()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, events: Sequence[Event], position: int | None = None) -> None:
        """position: the id of the event; only for a single event."""
        body = b"".join(_written_event(event, position) for event in events)
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        end = b"data: [DONE]\n\n" if self._form is not None and self._form.ENDS_WITH_DONE else b""
        await self._send({"type": "http.response.body", "body": end, "more_body": False})

    async def _respond(self, response: Response) -> None:
        response.headers.update(self._headers)
        await response(self._scope, self._receive, self._send)


def _written_event(event: Event, position: int | None) -> bytes:
    identity = b"" if position is None else b"id: %d\n" % position
    name = b"" if event.name is None else b"event: %s\n" % event.name.encode()
    return identity + name + b"data: " + on_one_line(event.data) + b"\n\n"


def on_one_line(data: bytes) -> bytes:
    """`data`, which is JSON, with the characters escaped that many clients treat as the end of a line."""
    for character, escaped in LINE_ENDS:
        data = data.replace(character, escaped)
    return data


def accepted_request_id(given: str | None) -> str:
    """The client's id if it is short printable ASCII, which metadata and logs need; otherwise a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return new_request_id()


def header_text(text: str) -> str:
    """A client's text, made fit for a header: printable ASCII of limited length."""
    printable = (character if character.isascii() and character.isprintable() else "?" for character in text)
    return "".join(printable)[:MAX_HEADER_CHARACTERS]

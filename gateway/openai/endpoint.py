"""One of OpenAI's two generating endpoints, as an ASGI application: whole answers, or server-sent events."""

import logging
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.gateway import Gateway
from gateway.generation import Delta
from gateway.live import LiveGeneration
from gateway.openai.body import ClientGone, read_body, while_connected
from gateway.openai.errors import error_json, error_response
from gateway.openai.format import Answer, Format, Head
from gateway.openai.parsing import parse
from gateway.openai.requests import GenerationBody
from gateway.tokenizer import Tokenizer
from mesh.errors import MeshError
from mesh.interceptors import MAX_REQUEST_ID_CHARACTERS, REQUEST_ID_KEY
from mesh.observe import new_request_id, request_id

IGNORED_FIELDS_HEADER = "x-deepmesh-ignored-fields"
MAX_HEADER_CHARACTERS = 1024

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
        headers = Headers(scope=scope)
        request_id.set(accepted_request_id(headers.get(REQUEST_ID_KEY)))
        reply = Reply(scope, receive, send)
        try:
            await self._answer(headers, receive, reply)
        except ClientGone:
            _log.debug("client gone")
        except MeshError as error:
            await reply.fail(error)

    async def _answer(self, headers: Headers, receive: Receive, reply: "Reply") -> None:
        tenant = self._gateway.tenants.authenticate(headers.get("authorization"))
        http = self._gateway.config.http
        content = await read_body(receive, http.body_bytes, http.body_seconds)
        parsed = parse(self._body_type, content, ignore_unknown=http.unknown_fields == "ignore")
        del content
        body = parsed.body
        body.refuse()
        reply.note_ignored(parsed.ignored)
        ask = body.ask(request_id.get() or new_request_id())
        async with while_connected(receive), self._gateway.generate(ask, tenant, "openai") as live:
            # Errors of admission come before the first delta, while there is still a status to send them with.
            first = await live.next()
            form = self._format(body, live)
            if body.streams:
                await self._stream(form, live, first, reply, body.streams_usage)
            else:
                await self._whole(form, live, first, reply)

    def _format(self, body: GenerationBody, live: LiveGeneration) -> Format:
        generation = live.generation
        head = Head(
            id=generation.request.request_id,
            created=int(time.time()),
            model=generation.model,
            with_token_ids=bool(body.return_token_ids),
            with_usage=body.streams_usage,
        )
        return self._format_type(head, self._gateway.catalog.text(generation.model).tokenizer)

    async def _stream(self, form: Format, live: LiveGeneration, first: Delta, reply: "Reply", with_usage: bool) -> None:
        await reply.start_events(form.opening())
        delta = first
        while True:
            await reply.event(form.chunk(delta))
            if delta.finish is not None:
                break
            delta = await live.next()
        if with_usage:
            await reply.event(form.usage_chunk(delta.finish.usage))
        await reply.end_events()

    async def _whole(self, form: Format, live: LiveGeneration, first: Delta, reply: "Reply") -> None:
        answer, delta = Answer(), first
        answer.add(delta)
        while delta.finish is None:
            delta = await live.next()
            answer.add(delta)
        await reply.json(form.whole(answer, delta.finish))


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

    async def json(self, body: bytes) -> None:
        await self._respond(Response(body, media_type="application/json"))

    async def fail(self, error: MeshError) -> None:
        """The error as the response, or as the last event of one that has begun."""
        if self._started:
            await self.event(error_json(error))
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self._respond(error_response(error))

    async def start_events(self, opening: bytes | None) -> None:
        self._started = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # Proxies that buffer would hold tokens back.
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in self._headers.items()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if opening is not None:
            await self.event(opening)

    async def event(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end_events(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _respond(self, response: Response) -> None:
        response.headers.update(self._headers)
        await response(self._scope, self._receive, self._send)


def accepted_request_id(given: str | None) -> str:
    """The client's id if it is short printable ASCII, as metadata and logs need it, or else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return new_request_id()


def header_text(text: str) -> str:
    """Text of a client's as a header may carry it: printable ASCII, and not too much of it."""
    printable = (character if character.isascii() and character.isprintable() else "?" for character in text)
    return "".join(printable)[:MAX_HEADER_CHARACTERS]

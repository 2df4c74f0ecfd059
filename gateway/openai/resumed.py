"""GET /v1/streams/{token}: resumes a stream whose gateway, or connection, is gone."""

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.choices import OneChoice, Piece
from gateway.gateway import Gateway
from gateway.generation import POSITION_FIELD
from gateway.openai.body import while_connected
from gateway.openai.endpoint import Reply, answering, credential, stream_events
from gateway.openai.format import ChatFormat, CompletionFormat, Format, StreamForm
from mesh.errors import InvalidRequest, UnknownStream

# Clients of server-sent events send this header with the id of the last event that they received.
LAST_EVENT_ID = "last-event-id"
LARGEST_POSITION = 2**31


class ResumedStreams:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with answering(self._gateway, scope, receive, send) as (headers, reply):
            await self._answer(scope["path_params"]["token"], headers, receive, reply)

    async def _answer(self, token: str, headers: Headers, receive: Receive, reply: Reply) -> None:
        tenant = self._gateway.tenants.authenticate(credential(headers))
        position = _position(headers.get(LAST_EVENT_ID))
        resumed = self._gateway.resume(token, position, tenant, "openai")
        async with while_connected(receive), resumed as (live, written):
            form = self._format(written)
            choices = OneChoice(live)
            await stream_events(form, choices, 1, await _first(choices), reply, opens=position == 0)

    def _format(self, written: bytes) -> Format:
        try:
            form = msgspec.msgpack.decode(written, type=StreamForm)
        except msgspec.DecodeError:
            raise UnknownStream("this stream began over gRPC: go on with it there") from None
        tokenizer = self._gateway.catalog.text(form.head.model).tokenizer
        return (ChatFormat if form.chat else CompletionFormat)(form.head, tokenizer)


async def _first(choices: OneChoice) -> Piece:
    """The first piece. Raises InvalidRequest naming the header if the client claims to have more tokens than the
    answer.
    """
    try:
        return await choices.next()
    except InvalidRequest as error:
        if error.metadata.get("field") == POSITION_FIELD:
            raise InvalidRequest(error.message, field=LAST_EVENT_ID) from error
        raise


def _position(last_event_id: str | None) -> int:
    """Tokens that the client has. Raises InvalidRequest."""
    if not last_event_id:
        return 0
    # int() accepts more than ASCII digits, and any number of them.
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 10):
        raise InvalidRequest("Last-Event-ID must be the id of an event of this stream", field="last-event-id")
    return min(int(last_event_id), LARGEST_POSITION)

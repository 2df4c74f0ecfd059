"""Connections of HTTP clients: bounds their number, the size and the duration of a request's headers, and what the
bodies of all requests take together while they arrive.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.openai.bodies import ArrivingBodies
from gateway.openai.giving_way import GivingWay
from gateway.openai.half_closed import PROBE, HalfClosed, tells_states
from gateway.openai.plain_requests import PlainRequestParser
from gateway.openai.refusals import BODIES, BUSY, CHUNKS, MALFORMED, STOPPING, TOO_LARGE, Refusal, RefusalLog
from mesh.observe.metrics import GATEWAY_HTTP_CLOSED

# How long a client of HTTP/1.0 that has closed its sending side waits for an answer to begin: it knows no 1xx, which
# could tell whether it still reads.
PATIENCE_WITHOUT_PROBE_SECONDS = 1.0
# More than any client of ours sends. The parser joins the pieces of a header again at each read, so an unbounded header
# would take time quadratic in its length.
MAX_HEAD_BYTES = 65536
# Requests of a connection that wait for the answer to one before them. Hardly any client sends ahead at all; a read of
# 256 KiB can hold thousands of requests, whose parsing nothing interrupts.
MAX_PIPELINED = 16
# Chunks of a body that may have fewer than SMALL_CHUNK_BYTES on average: parsing one takes as long as copying thousands
# of bytes, and nothing interrupts it either.
MAX_SMALL_CHUNKS = 16384
SMALL_CHUNK_BYTES = 16


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    connections: int
    # Bounds the time from the start of a connection, or from a request's first byte, to the end of its headers.
    header_seconds: float
    # What is read of a body. What exceeds it is forgotten as it arrives.
    body_bytes: int
    # Bounds the bytes of all bodies together that are not whole yet.
    arriving_bytes: int


class LimitedConfig(uvicorn.Config):
    """A uvicorn configuration with limits for connections."""

    def __init__(self, application: ASGIApp, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(application, http=LimitedConnection, **settings)
        self.limits = limits
        # Set whenever a connection has ended.
        self.lost = asyncio.Event()
        self.refusals = RefusalLog()
        self.bodies = ArrivingBodies(limits.arriving_bytes, limits.body_bytes)
        self.giving_way: GivingWay[LimitedConnection] = GivingWay()


class _Refused(Exception):
    """Stops the parser in the middle of what was read."""


class LimitedConnection(HttpToolsProtocol):
    """Closes itself if headers take too long, are too large or no HTTP, if a body has too many small chunks, or if too
    many requests are sent ahead. Ignores requests to change its protocol.

    A connection beyond the limit replaces the connection that has been idle for longest. If none is idle, the one that
    has not sent its request's whole body for longest is answered 503, and if there is none, the new one. If the bodies
    that arrive take too much memory, the connection with the largest is answered 503 too.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, LimitedConfig)
        self.parser = PlainRequestParser(self)
        # As uvicorn does where httptools can (0.6.3): a client may send more after a request that closes.
        if hasattr(self.parser, "set_dangerous_leniencies"):
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        # Whether the headers that were read last ask for another protocol: the parser will read them again.
        self._read_again = False
        self._limits, self._lost = config.limits, config.lost
        self._refusals, self._bodies, self._giving_way = config.refusals, config.bodies, config.giving_way
        self._header_timer: asyncio.TimerHandle | None = None
        # Bytes read since the headers, a part of the body or the message was last complete. They belong to a URL,
        # headers, trailers or a chunk's extensions. Nothing else bounds these, and their sender need not have a key.
        self._head_bytes = 0
        # Bytes of the request's URL and headers so far.
        self._field_bytes = 0
        # What one read brought of a body, and how many chunks and bytes the body has without it.
        self._chunks: list[bytes] = []
        self._body_chunks = self._body_bytes = 0
        self._half_closed: HalfClosed | None = None

    @property
    def idle(self) -> bool:
        """Whether the connection has no request in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _reads_body(self) -> bool:
        """Whether the one request in progress is not whole, and its answer has not begun."""
        return self.cycle is not None and self.cycle.more_body and not (self.cycle.response_started or self.pipeline)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()
        if len(self.connections) - self._giving_way.closing > self._limits.connections:
            self._make_room()
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_headers()
        self._bodies.forget(self)
        self._giving_way.lost(self)
        if self._half_closed is not None:
            self._half_closed.stop()
        super().connection_lost(exc)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        if self.idle and self._header_timer is None:
            self._await_headers()
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # CONNECT: it was answered like any other request, and its connection carries nothing else.
            pass
        except httptools.HttpParserError:
            self._refuse(MALFORMED)
        self._take_chunks()
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection open: a request that is whole is answered."""
        if not tells_states() or self.cycle is None or self.cycle.more_body or self.cycle.response_started:
            return False
        self.cycle.keep_alive = False
        probed = self.cycle.scope["http_version"] != "1.0"
        if probed and not self.pipeline:
            self.transport.write(PROBE)
        deadline = self.loop.time() + PATIENCE_WITHOUT_PROBE_SECONDS
        newest = self.cycle
        self._half_closed = HalfClosed(
            self.transport, lambda: not probed and not newest.response_started and self.loop.time() > deadline
        )
        return True

    def on_message_begin(self) -> None:
        self._field_bytes = self._body_chunks = self._body_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # With ": " and the end of the line.
        self._field_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._stop_awaiting_headers()
        # Headers that come in one piece were not counted while they came.
        if self._field_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)
            return
        # A proxy may have gone by the other one (RFC 9112, section 3.2).
        if sum(name == b"host" for name, _ in self.headers) > 1:
            self._refuse(MALFORMED)
            return
        # A tunnel is the one wish that a request consists of.
        self._read_again = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._read_again:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusals.note("pipelined", self.client)
            self._close("pipelined")
            raise _Refused
        super().on_headers_complete()
        if self.cycle.scope["http_version"] == "1.0":
            _end_by_closing(self.cycle)
        self._note_state()

    def on_body(self, body: bytes) -> None:
        # Joined once for a read: what uvicorn does with a piece takes longer than to parse it.
        self._chunks.append(body)
        if len(self._chunks) >= MAX_SMALL_CHUNKS:
            self._take_chunks()
            if self.transport.is_closing():
                raise _Refused

    def _take_chunks(self) -> None:
        if not self._chunks:
            return
        body = b"".join(self._chunks)
        self._body_chunks += len(self._chunks)
        self._body_bytes += len(body)
        self._chunks.clear()
        self._head_bytes = 0
        if self._body_chunks >= MAX_SMALL_CHUNKS and self._body_bytes < SMALL_CHUNK_BYTES * self._body_chunks:
            self._refuse(CHUNKS)
        if not self.transport.is_closing():
            super().on_body(body)
            self._bodies.add(self, len(body))

    def give_up_body(self) -> None:
        self._refuse(BODIES)

    def cut_off(self) -> None:
        """Close although a request is in progress, because the server stops."""
        self._refuse(STOPPING)

    def on_message_complete(self) -> None:
        self._take_chunks()
        self._head_bytes = 0
        self._bodies.forget(self)
        if not self._read_again and not self.transport.is_closing():
            super().on_message_complete()
            self._note_state()

    def head_without_upgrade(self) -> bytes | None:
        """See PlainRequests."""
        if not self._read_again:
            return None
        self._read_again = False
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()
        if self.pipeline:
            # uvicorn reads on after each answer, however many requests are left.
            self.flow.pause_reading()

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.header_seconds, self._close, "headers")

    def _stop_awaiting_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _note_state(self) -> None:
        # An answer to a request sent ahead may end after the connection was lost.
        if not self.transport.is_closing():
            self._giving_way.note(self, idle=self.idle, reading=self._reads_body)

    def _make_room(self) -> None:
        idle, reading = self._giving_way.longest_idle(), self._giving_way.longest_reading()
        if idle is not None:
            idle._close("idle")
        else:
            # A client that sends its body slowly must not keep others out.
            (reading or self)._refuse(BUSY)

    def _refuse(self, refusal: Refusal) -> None:
        if self.transport.is_closing():
            return
        # In the middle of an answer it would become a part of that.
        if self.idle or self._reads_body:
            self.transport.write(refusal.answer)
        self._refusals.note(refusal.why, self.client)
        self._close(refusal.why)

    def _close(self, why: str) -> None:
        GATEWAY_HTTP_CLOSED.labels(why).inc()
        self.transport.close()
        self._giving_way.closes(self)


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: an answer without a length ends where the connection does (RFC 9112, section 6.3)."""
    send_framed, has_length = cycle.send, True

    async def send(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send_framed(message)  # type: ignore[arg-type]

    cycle.send = send  # type: ignore[method-assign, assignment]

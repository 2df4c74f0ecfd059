"""What a client is told before its connection is closed, and the line in the log about it."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from gateway.openai.answer_bodies import ErrorBody, ErrorDetail
from mesh.addresses import with_port

# Any client may cause the lines, as often as it likes: there is at most one in this time.
PAUSE_SECONDS = 10.0

_log = logging.getLogger("deepmesh.gateway")


@dataclass(frozen=True, slots=True)
class Refusal:
    # For the metric and the log.
    why: str
    # A whole answer, after which the connection is closed.
    answer: bytes


def _refusal(why: str, status: HTTPStatus, kind: str, message: str, header: str = "") -> Refusal:
    body = msgspec.json.encode(ErrorBody(ErrorDetail(message, kind, why)))
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{header}connection: close\r\n\r\n"
    )
    return Refusal(why, head.encode() + body)


MALFORMED = _refusal(
    "malformed",
    HTTPStatus.BAD_REQUEST,
    "invalid_request_error",
    "the request is not valid HTTP/1.1: this port takes no TLS, HTTP/2 or gRPC",
)
TOO_LARGE = _refusal(
    "large",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "invalid_request_error",
    "URL and headers have more than 64 KiB: send fewer or shorter ones",
)
CHUNKS = _refusal(
    "chunks",
    HTTPStatus.BAD_REQUEST,
    "invalid_request_error",
    "the body comes in thousands of chunks of a few bytes: send larger ones, or a content-length",
)
BUSY = _refusal(
    "busy",
    HTTPStatus.SERVICE_UNAVAILABLE,
    "server_error",
    "the gateway has as many connections as it can hold: retry later",
    "retry-after: 1\r\n",
)
BODIES = _refusal(
    "bodies",
    HTTPStatus.SERVICE_UNAVAILABLE,
    "server_error",
    "the gateway receives as many large bodies as it can hold: retry later",
    "retry-after: 1\r\n",
)
STOPPING = _refusal(
    "stopping",
    HTTPStatus.SERVICE_UNAVAILABLE,
    "server_error",
    "the gateway stops, and the body was not whole: send the request again",
    "retry-after: 1\r\n",
)


class RefusalLog:
    """Logs refused connections, the first at once; then a line at most every PAUSE_SECONDS, which names the newest and
    counts those since the line before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock()
        self._count = 0

    def note(self, why: str, client: tuple[str, int] | None) -> None:
        """client: address and port of the peer; None if the system does not tell."""
        self._count += 1
        now = self._clock()
        if now < self._due:
            return
        peer = "unknown" if client is None else with_port(*client)
        fields = {"why": why, "client": peer, "connections": self._count}
        _log.warning("an HTTP connection was refused", extra={"fields": fields})
        self._due, self._count = now + PAUSE_SECONDS, 0

"""Reads a request's body, and notices if its client goes away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive

from gateway.gateway import Gateway
from mesh.errors import BodyTooLarge, DeadlineExceeded, UnsupportedCoding

# A body over the limit is read and discarded up to this many times the limit: most clients look at the answer only
# after they have sent everything.
DISCARDED_TIMES = 8

UNCOMPRESSED = frozenset(("", "identity", "chunked"))


class ClientGone(Exception):
    """The client closed its connection: no answer can reach it."""


async def read_body(gateway: Gateway, headers: Headers, receive: Receive) -> bytes:
    """The whole body, within the limits of `http` in the gateway's configuration. A large one waits for its turn.

    Raises BodyTooLarge, DeadlineExceeded if the body takes too long, UnsupportedCoding if it is compressed, and
    ClientGone.
    """
    limits = gateway.config.http
    for header in ("content-encoding", "transfer-encoding"):
        codings = {coding.strip().lower() for coding in headers.get(header, "").split(",")}
        if refused := codings - UNCOMPRESSED:
            raise UnsupportedCoding(f"the body is encoded in {', '.join(sorted(refused))}: send it as it is")
    try:
        async with asyncio.timeout(limits.body_seconds):
            content = await _read(receive, limits.body_bytes)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {limits.body_seconds:g} seconds") from None
    await gateway.loop_turns.next(len(content))
    return content


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
            more = more and size <= DISCARDED_TIMES * limit
    if size > limit:
        raise BodyTooLarge(f"the body has more than {limit} bytes: send less")
    return b"".join(parts)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Interrupt the block with ClientGone once the client closes its connection. The body must have been read."""
    loop = asyncio.get_running_loop()
    scope = asyncio.timeout(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not scope.expired():
            scope.reschedule(loop.time())

    watcher = asyncio.create_task(watch())
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientGone from None
    finally:
        watcher.cancel()

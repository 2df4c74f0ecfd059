"""How the HTTP server stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.config import HttpConfig
from gateway.openai.server import HttpServer


@dataclass
class Slow:
    """Answers when it is released."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    async def answer(self, request: Request) -> Response:
        self.asked.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return PlainTextResponse("done")


async def quick(request: Request) -> Response:
    return PlainTextResponse("quick")


@asynccontextmanager
async def asked(slow: Slow, drain_seconds: float) -> AsyncIterator[tuple[HttpServer, "asyncio.Task[httpx.Response]"]]:
    """A server that answers slowly, and a client that waits for it; the test stops the server."""
    application = Starlette(routes=[Route("/", slow.answer), Route("/quick", quick)])
    server = HttpServer(HttpConfig(port=0), application, drain_seconds=drain_seconds, stalled_seconds=60.0)
    await server.__aenter__()
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
        answer = asyncio.create_task(client.get(f"http://127.0.0.1:{server.port}/"))
        await slow.asked.wait()
        yield server, answer


async def test_a_stopping_server_lets_an_answer_end() -> None:
    slow = Slow()
    async with asked(slow, drain_seconds=60.0) as (server, answer):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /quick HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await reader.readuntil(b"quick")
        stopping = asyncio.create_task(server.__aexit__(None, None, None))
        assert await reader.read() == b""
        writer.close()
        assert not stopping.done()
        slow.released.set()
        assert (await answer).text == "done"
        await stopping


async def test_an_answer_longer_than_the_drain_is_cut() -> None:
    slow = Slow()
    async with asked(slow, drain_seconds=1.0) as (server, answer):
        await server.__aexit__(None, None, None)
        await asyncio.gather(answer, return_exceptions=True)
    assert slow.cancelled

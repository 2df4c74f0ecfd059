"""What the gateway serves on its metrics port: Prometheus' metrics, and a page that shows the mesh at work.

The port is for operators. Only the playground, which generates, asks for a key, and only if keys are configured.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from importlib.resources import files

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.account import RecentAnswers
from gateway.config import GatewayConfig, HttpConfig
from gateway.gateway import Gateway
from gateway.openai.endpoint import Endpoint
from gateway.openai.foreign_pages import ForeignPages
from gateway.openai.format import ChatFormat
from gateway.openai.http import mesh_error
from gateway.openai.requests import ChatCompletionBody
from gateway.openai.server import HttpServer
from gateway.page.mesh_link import MeshLink
from gateway.processes.siblings import Siblings
from mesh.addresses import is_loopback, with_port
from mesh.errors import MeshError, Overloaded
from mesh.rpc.channel import Channels

# The page loads nothing from other hosts, and no other page may embed it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/figures.js": ("figures.js", "text/javascript"),
    "/mesh.js": ("mesh.js", "text/javascript"),
    "/playground.js": ("playground.js", "text/javascript"),
}
MOST_WATCHERS = 32
CONNECTIONS = 128
LAST_WORDS_SECONDS = 1.0

_log = logging.getLogger("deepmesh.gateway")


@asynccontextmanager
async def operator_server(
    config: GatewayConfig, gateway: Gateway, channels: Channels, siblings: Siblings | None = None
) -> AsyncIterator[int | None]:
    """Serve for the length of the block, if there is a metrics port; yields the port.

    siblings: the gateway's processes, if there are several; their metrics are served here too.
    """
    server = config.server
    if server.metrics_port is None:
        yield None
        return
    http = HttpConfig(host=server.metrics_host or server.host, port=server.metrics_port, connections=CONNECTIONS)
    link = MeshLink(
        lambda: gateway.scheduler,
        channels,
        lambda: gateway.dispatcher.live_generations,
        lambda: gateway.dispatcher.received_tokens,
        keys=bool(config.api_keys),
    )
    stalled_seconds = config.limits.stalled_seconds
    application = operator_application(gateway, link, own_metrics if siblings is None else siblings.metrics)
    listening = HttpServer(http, application, drain_seconds=LAST_WORDS_SECONDS, stalled_seconds=stalled_seconds)
    try:
        async with listening:
            url = f"http://{with_port(http.host, listening.port)}"
            _log.info("serving metrics and a page", extra={"fields": {"url": url}})
            yield listening.port
    finally:
        await link.close()


def operator_application(gateway: Gateway, link: MeshLink, collect: Callable[[], Awaitable[bytes]]) -> Starlette:
    """The ASGI application. collect: renders the metrics in Prometheus' text format."""

    async def metrics(request: Request) -> Response:
        return Response(await collect(), media_type=CONTENT_TYPE_LATEST)

    local = is_loopback(gateway.config.server.metrics_host or gateway.config.server.host)
    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/live", Live(link, gateway.answers), methods=["GET"]),
            Route("/v1/chat/completions", Endpoint(gateway, ChatCompletionBody, ChatFormat.of), methods=["POST"]),
            *(Route(path, _file(name, kind)) for path, (name, kind) in FILES.items()),
        ],
        middleware=[Middleware(ForeignPages, origins=(), only_addresses=local)],
        exception_handlers={MeshError: mesh_error},
    )


async def own_metrics() -> bytes:
    # On a thread: this takes milliseconds, during which the event loop could send no token.
    return await asyncio.to_thread(generate_latest)


def _file(name: str, kind: str) -> Response:
    """A file of this package."""
    return Response(files("gateway.page").joinpath(name).read_bytes(), media_type=kind, headers=HEADERS)


class Live:
    """An ASGI application that sends two events: `mesh` with a view, `answers` with those that ended since the last
    event.
    """

    def __init__(self, link: MeshLink, answers: RecentAnswers) -> None:
        self._link = link
        self._answers = answers
        self._watchers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._watchers >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} pages watch already: close one")
        self._watchers += 1
        try:
            answer = StreamingResponse(self._events(), media_type="text/event-stream", headers=HEADERS)
            await answer(scope, receive, send)
        finally:
            self._watchers -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        seen = 0
        async with aclosing(self._link.views()) as views:
            async for view in views:
                new, seen = self._answers.after(seen), self._answers.count
                yield b"event: answers\ndata: " + msgspec.json.encode(new) + b"\n\n"
                yield b"event: mesh\ndata: " + view + b"\n\n"

"""Counts HTTP responses by path and status."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh.observe.metrics import HTTP_RESPONSES

# Any other path is counted as "other": a client could name any number of paths.
PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/tokenize", "/detokenize", "/version", "/health"),
    )
)


class CountedResponses:
    """ASGI middleware that sees the start of each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                HTTP_RESPONSES.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)

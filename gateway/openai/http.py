"""The OpenAI API over HTTP: its routes."""

import time

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.gateway import Gateway
from gateway.openai.endpoint import Endpoint
from gateway.openai.errors import error_response, route_error
from gateway.openai.format import ChatFormat, CompletionFormat
from gateway.openai.requests import ChatCompletionBody, CompletionBody
from gateway.openai.responses import ModelBody, ModelList
from mesh.errors import MeshError


def application(gateway: Gateway) -> Starlette:
    """The ASGI application."""
    routes = Routes(gateway)
    chat = Endpoint(gateway, ChatCompletionBody, ChatFormat)
    completions = Endpoint(gateway, CompletionBody, CompletionFormat)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
        ],
        exception_handlers={HTTPException: route_error, MeshError: mesh_error},
    )


async def mesh_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshError)
    return error_response(error)


class Routes:
    """What answers at once."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started_at = int(time.time())

    async def models(self, request: Request) -> Response:
        self._gateway.tenants.authenticate(request.headers.get("authorization"))
        models = [
            ModelBody(model.name, self._started_at, model.limits.context_tokens)
            for model in self._gateway.catalog.listed()
        ]
        return Response(msgspec.json.encode(ModelList(models)), media_type="application/json")

    async def health(self, request: Request) -> Response:
        """200 while some worker accepts requests, 503 otherwise."""
        if self._gateway.available:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "no worker takes requests"}, status_code=503)

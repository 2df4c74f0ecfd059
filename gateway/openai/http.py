"""The OpenAI API over HTTP: its routes."""

import time
from http import HTTPStatus
from importlib.metadata import version

import msgspec
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from gateway.catalog import ListedModel
from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from gateway.messages.body import MessageRequest
from gateway.messages.errors import failure_response
from gateway.messages.form import MessagesForm
from gateway.messages.token_count import TokenCounter
from gateway.openai.answer_bodies import Health, ModelBody, ModelList, Version
from gateway.openai.body import ClientGone
from gateway.openai.counted import CountedResponses
from gateway.openai.docs_page import docs_page
from gateway.openai.endpoint import IGNORED_FIELDS_HEADER, STREAM_HEADER, Endpoint, credential
from gateway.openai.errors import error_response, route_error
from gateway.openai.foreign_pages import ForeignPages
from gateway.openai.format import ChatFormat, CompletionFormat
from gateway.openai.openapi import document
from gateway.openai.requests import ChatCompletionBody, CompletionBody
from gateway.openai.resumed import ResumedStreams
from gateway.openai.tokens import TokenRoutes
from gateway.responses.endpoint import ResponsesEndpoint, StoredResponses
from mesh.addresses import is_loopback
from mesh.errors import MeshError
from mesh.rpc.interceptors import REQUEST_ID_KEY


def application(gateway: Gateway) -> Starlette:
    """The ASGI application."""
    routes, tokens = Routes(gateway), TokenRoutes(gateway)
    chat = Endpoint(gateway, ChatCompletionBody, ChatFormat.of)
    completions = Endpoint(gateway, CompletionBody, CompletionFormat.of)
    stored = StoredResponses(gateway)
    messages = Endpoint(gateway, MessageRequest, MessagesForm.of, failure_response)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", ResponsesEndpoint(gateway), methods=["POST"]),
            # OpenAI has this route and we do not; without this line "compact" would be taken for an id.
            Route("/v1/responses/compact", absent, methods=["POST"]),
            Route("/v1/responses/{response_id}", stored.get),
            Route("/v1/responses/{response_id}", stored.delete, methods=["DELETE"]),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", TokenCounter(gateway).count, methods=["POST"]),
            Route("/v1/streams/{token}", ResumedStreams(gateway), methods=["GET"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/version", routes.version),
            Route("/health", routes.health),
            Route("/openapi.json", routes.openapi),
            Route("/docs", routes.docs),
        ],
        middleware=_middleware(gateway.config),
        exception_handlers={HTTPException: route_error, MeshError: mesh_error, ClientGone: client_gone},
    )


async def absent(request: Request) -> Response:
    raise HTTPException(HTTPStatus.NOT_FOUND)


def _middleware(config: GatewayConfig) -> list[Middleware]:
    origins = config.http.cors_origins
    only_addresses = is_loopback(config.http.host) and not config.api_keys
    foreign = Middleware(ForeignPages, origins=origins, only_addresses=only_addresses, key="http.cors_origins")
    if not origins:
        return [Middleware(CountedResponses), foreign]
    return [
        Middleware(CountedResponses),
        foreign,
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_KEY, IGNORED_FIELDS_HEADER, STREAM_HEADER, "retry-after"),
        ),
    ]


async def mesh_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshError)
    return error_response(error)


async def client_gone(request: Request, error: Exception) -> Response:
    """No client reads this response; 499 is the status that proxies log for a client that left."""
    return Response(status_code=499)


class Routes:
    """Handlers of the requests that generate nothing."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started_at = int(time.time())

    async def models(self, request: Request) -> Response:
        self._authenticate(request)
        return _json(ModelList([self._body(model) for model in self._gateway.catalog.listed()]))

    async def model(self, request: Request) -> Response:
        self._authenticate(request)
        return _json(self._body(self._gateway.catalog.find(request.path_params["model"])))

    async def version(self, request: Request) -> Response:
        return _json(Version(version("deepmesh")))

    async def health(self, request: Request) -> Response:
        """200 while some worker accepts requests, 503 otherwise."""
        if self._gateway.available:
            return _json(Health("ok"))
        return _json(Health("no worker takes requests"), 503)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document())

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(docs_page(document()))

    def _authenticate(self, request: Request) -> None:
        self._gateway.tenants.authenticate(credential(request.headers))

    def _body(self, model: ListedModel) -> ModelBody:
        said = dict(model.sampling.said)
        return ModelBody(model.name, self._started_at, model.limits.context_tokens, sampling_defaults=said or UNSET)


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")

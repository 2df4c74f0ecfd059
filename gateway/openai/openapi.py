"""The API's description in OpenAPI 3.1, from the types that read requests and write answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct

from gateway.openai.requests import ChatCompletionBody, CompletionBody
from gateway.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    Detokenized,
    ErrorBody,
    Health,
    ModelBody,
    ModelList,
    ResponseBody,
    Tokenized,
    Version,
)
from gateway.openai.tokens import DetokenizeBody, TokenizeBody

REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    path: str
    method: str
    summary: str
    response: Any
    request: type[Struct] | None = None
    # One server-sent event, if the answer can be streamed.
    event: Any = None
    needs_key: bool = True


OPERATIONS: Sequence[Operation] = (
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a chat",
        ResponseBody[ChatChoice],
        ChatCompletionBody,
        ResponseBody[ChatChunkChoice],
    ),
    Operation(
        "/v1/completions",
        "post",
        "Continue a text",
        ResponseBody[CompletionChoice],
        CompletionBody,
        ResponseBody[CompletionChoice],
    ),
    Operation(
        "/v1/streams/{token}",
        "get",
        "Go on with a stream behind Last-Event-ID, at any gateway",
        ResponseBody[ChatChunkChoice],
        None,
        ResponseBody[ChatChunkChoice],
    ),
    Operation("/v1/models", "get", "The models that can be asked for now", ModelList),
    Operation("/v1/models/{model}", "get", "One of them", ModelBody),
    Operation("/tokenize", "post", "The token ids of a text or a chat", Tokenized, TokenizeBody),
    Operation("/detokenize", "post", "The text of token ids", Detokenized, DetokenizeBody),
    Operation("/version", "get", "The version of deepmesh", Version, needs_key=False),
    Operation("/health", "get", "Whether some worker takes requests: 503 otherwise", Health, needs_key=False),
)


def document() -> dict[str, Any]:
    kinds: list[Any] = [ErrorBody]
    for operation in OPERATIONS:
        kinds += [kind for kind in (operation.request, operation.response, operation.event) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    by_kind: dict[Any, Mapping[str, Any]] = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "deepmesh", "version": version("deepmesh")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, by_kind: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    content = {"application/json": {"schema": by_kind[operation.response]}}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": by_kind[operation.event]}
    failure = {"description": "An error", "content": {"application/json": {"schema": by_kind[ErrorBody]}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}, "default": failure},
    }
    if operation.request is not None:
        schema = {"application/json": {"schema": by_kind[operation.request]}}
        described["requestBody"] = {"required": True, "content": schema}
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.needs_key:
        # An empty requirement: a mesh without keys asks for none.
        described["security"] = [{"key": []}, {}]
    return described

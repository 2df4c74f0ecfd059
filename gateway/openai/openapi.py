"""The API's description in OpenAPI 3.1, from the types that read requests and write answers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct

from gateway.messages.body import MessageRequest, PromptBody
from gateway.messages.output import AnsweredMessage, Failure, MessageEvent, TokenCount
from gateway.openai.answer_bodies import (
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
from gateway.openai.requests import ChatCompletionBody, CompletionBody
from gateway.openai.tokens import DetokenizeBody, TokenizeBody
from gateway.responses.body import ResponseRequest
from gateway.responses.output import Deleted, Response, ResponseEvent

REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    path: str
    method: str
    summary: str
    response: Any
    request: type[Struct] | None = None
    # Type of one server-sent event's data, if the answer can be streamed.
    event: Any = None
    needs_key: bool = True
    failure: type[Struct] = ErrorBody


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
    Operation("/v1/responses", "post", "Answer items with items", Response, ResponseRequest, ResponseEvent),
    Operation("/v1/responses/{response_id}", "get", "A response that is stored", Response),
    Operation("/v1/responses/{response_id}", "delete", "Store it no longer", Deleted),
    Operation(
        "/v1/messages",
        "post",
        "Answer messages, as Anthropic's clients ask",
        AnsweredMessage,
        MessageRequest,
        MessageEvent,
        failure=Failure,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "How many tokens the prompt of such messages has",
        TokenCount,
        PromptBody,
        failure=Failure,
    ),
    Operation(
        "/v1/streams/{token}",
        "get",
        "Continue a stream after Last-Event-ID, at any gateway",
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


@cache
def document() -> dict[str, Any]:
    """Made when it is first asked for: it takes some hundredths of a second, and few gateways are asked."""
    kinds: list[Any] = []
    for each in OPERATIONS:
        kinds += [kind for kind in (each.failure, each.request, each.response, each.event) if kind is not None]
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
        content["text/event-stream"] = {"schema": _event(by_kind[operation.event])}
    failure = {"description": "An error", "content": {"application/json": {"schema": by_kind[operation.failure]}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}, "default": failure},
    }
    if operation.request is not None:
        schema = {"application/json": {"schema": by_kind[operation.request]}}
        described["requestBody"] = {"required": True, "content": schema}
    if parameters := re.findall(r"\{(\w+)\}", operation.path):
        string = {"type": "string", "minLength": 1}
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": string} for name in parameters
        ]
    if operation.needs_key:
        # The empty requirement says that a key is optional: a mesh without keys asks for none.
        described["security"] = [{"key": []}, {}]
    return described


def _event(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A server-sent event whose data is JSON of this schema, or [DONE] at the end."""
    text = {"type": "string"}
    json = {**text, "contentMediaType": "application/json", "contentSchema": schema}
    data = {"anyOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "required": ["data"], "properties": {"event": text, "id": text, "data": data}}

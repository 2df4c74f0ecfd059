"""Mesh errors in the form of OpenAI's API."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.openai.answer_bodies import ErrorBody, ErrorDetail
from mesh.errors import BodyTooLarge, MeshError, Retry, UnsupportedCoding, shortened

# HTTP status and OpenAI's error type, by the name of the gRPC code. Any other code is 500.
STATUSES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": (400, "invalid_request_error"),
        "UNAUTHENTICATED": (401, "invalid_request_error"),
        "NOT_FOUND": (404, "invalid_request_error"),
        "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
        "ABORTED": (503, "server_error"),
        "UNAVAILABLE": (503, "server_error"),
        "DEADLINE_EXCEEDED": (504, "server_error"),
    }
)
# OpenAI's codes by our reasons. Any other reason becomes its own code, in lower case.
CODES: Mapping[str, str] = MappingProxyType(
    {
        "CONTEXT_EXCEEDED": "context_length_exceeded",
        "INVALID_REQUEST": "invalid_value",
        "MISSING_FIELD": "missing_required_parameter",
        "OVERLOADED": "rate_limit_exceeded",
        "UNAUTHENTICATED": "invalid_api_key",
        "UNKNOWN_FIELD": "unknown_parameter",
        "UNKNOWN_MODEL": "model_not_found",
        "UNSUPPORTED": "unsupported_parameter",
        "WRONG_TYPE": "invalid_type",
    }
)
DEFAULT_RETRY_AFTER_MS = 1000
# The name of a field may come from the client, so it is shortened.
MAX_FIELD_CHARACTERS = 200


def http_status(error: MeshError) -> int:
    if isinstance(error, BodyTooLarge):
        return 413
    if isinstance(error, UnsupportedCoding):
        return 415
    return STATUSES.get(error.code.name, (500, ""))[0]


def error_body(error: MeshError) -> ErrorBody:
    _, kind = STATUSES.get(error.code.name, (500, "server_error"))
    code = CODES.get(error.reason, error.reason.lower())
    return ErrorBody(ErrorDetail(shortened(error.message), kind, code, error_field(error)))


def error_field(error: MeshError) -> str | None:
    """The field that the error names, if it names one."""
    field = error.metadata.get("field")
    return None if field is None else shortened(field, MAX_FIELD_CHARACTERS)


def error_json(error: MeshError) -> bytes:
    return msgspec.json.encode(error_body(error))


def error_headers(error: MeshError) -> dict[str, str]:
    """Retry-After, in whole seconds, unless trying again cannot help; what bodies may be encoded in, where that is
    wrong.
    """
    if isinstance(error, UnsupportedCoding):
        return {"accept-encoding": "identity"}
    if error.retry is Retry.NEVER:
        return {}
    delay_ms = DEFAULT_RETRY_AFTER_MS if error.retry_after_ms is None else error.retry_after_ms
    return {"retry-after": str(max(1, math.ceil(delay_ms / 1000)))}


def error_response(error: MeshError) -> Response:
    return Response(error_json(error), http_status(error), error_headers(error), "application/json")


async def route_error(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods with an error in the usual form."""
    assert isinstance(error, HTTPException)
    advice = "; /docs lists the routes" if error.status_code == 404 else ""
    message = f"{shortened(f'{request.method} {request.url.path}')}: {error.detail.lower()}{advice}"
    code = "method_not_supported" if error.status_code == 405 else "unknown_url"
    body = ErrorBody(ErrorDetail(message, "invalid_request_error", code))
    return Response(msgspec.json.encode(body), error.status_code, error.headers, "application/json")

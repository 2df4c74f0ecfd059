"""Mesh errors in the form of Anthropic's API."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.responses import Response

from gateway.messages.output import Failure, FailureDetail
from gateway.openai.errors import error_field, error_headers, http_status
from mesh.errors import MeshError, shortened
from mesh.observe.spans import request_id

# Error types by HTTP status; any other status is api_error.
KINDS: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        415: "invalid_request_error",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def failure(error: MeshError) -> Failure:
    kind = KINDS.get(http_status(error), "api_error")
    return Failure(FailureDetail(kind, shortened(error.message), error_field(error)), request_id.get())


def failure_response(error: MeshError) -> Response:
    content = msgspec.json.encode(failure(error))
    return Response(content, http_status(error), error_headers(error), "application/json")

"""Schemathesis over our OpenAPI document, against a mesh: `make check-schemathesis`.

It sends bodies that the document allows and bodies that it does not, and looks at every answer's status, type and form.
"""

from typing import Any

import pytest

pytest.importorskip("schemathesis", reason="part of the extra 'conformance'")

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from gateway.openai.openapi import document

pytestmark = pytest.mark.check("schemathesis")
CHECKS = (
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
EXAMPLES = 50
# The shipped model writes on and on: where a body gives no limit, it gets one.
LIMIT = 8
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
api = schemathesis.openapi.from_dict(document())


@api.parametrize()  # type: ignore[untyped-decorator]
@settings(
    max_examples=EXAMPLES,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_answers_are_as_described(case: Any, mesh_url: str) -> None:
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], LIMIT)
        limit = LIMITS.get(case.path)
        if limit is not None and case.body.get(limit) is None:
            case.body[limit] = LIMIT
    response = case.call(base_url=mesh_url, timeout=60)
    case.validate_response(response, checks=CHECKS)

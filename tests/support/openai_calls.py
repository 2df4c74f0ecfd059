"""Calls to the OpenAI API of a gateway under test."""

from typing import Any, cast

import openai

from tests.support.gateways import Mesh
from tests.support.waiting import PATIENCE_SECONDS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]


def client(mesh: Mesh, key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{mesh.http_port}/v1",
        api_key=key,
        max_retries=0,
        timeout=PATIENCE_SECONDS,
        http_client=cast(Any, mesh.http),
    )

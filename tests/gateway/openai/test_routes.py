"""The routes besides the two that generate: models, tokens, version, the API's own description, CORS."""

import openai
import pytest

from gateway.config import ApiKeyConfig, HttpConfig
from gateway.openai.openapi import OPERATIONS
from mesh.domain.sampling import Sampling
from tests.support.gateways import running_mesh
from tests.support.openai_calls import HELLO, client

ORIGIN = {"origin": "https://app.example"}


async def test_one_model_is_found_by_its_name() -> None:
    async with running_mesh() as mesh:
        for name in ("oracle", "org/oracle"):
            assert (await client(mesh).models.retrieve(name)).id == "oracle"
            assert (await mesh.http.post("/tokenize", json={"model": name, "prompt": "a"})).status_code == 200
        with pytest.raises(openai.NotFoundError) as caught:
            await client(mesh).models.retrieve("org/other")
        assert caught.value.code == "model_not_found"


async def test_a_text_becomes_tokens_and_text_again() -> None:
    async with running_mesh() as mesh:
        body = {"prompt": "héllo 🤖", "return_token_strs": True}
        whole = (await mesh.http.post("/tokenize", json=body)).json()
        assert (whole["count"], whole["max_model_len"]) == (len(whole["tokens"]), 4096)
        assert whole["token_strs"][0] == "<｜begin▁of▁sentence｜>"
        bare = (await mesh.http.post("/tokenize", json={**body, "add_special_tokens": False})).json()
        assert bare["tokens"] == whole["tokens"][1:]
        for tokens, text in ((bare, "héllo 🤖"), (whole, "<｜begin▁of▁sentence｜>héllo 🤖")):
            answer = await mesh.http.post("/detokenize", json={"tokens": tokens["tokens"]})
            assert answer.json() == {"prompt": text}


async def test_a_chat_is_tokenized_as_it_would_be_answered() -> None:
    async with running_mesh() as mesh:
        tokens = (await mesh.http.post("/tokenize", json={"messages": HELLO})).json()["tokens"]
        await mesh.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1})
        assert list(mesh.worker.submissions[0].token_ids) == tokens


async def test_bad_token_requests_are_refused_by_field() -> None:
    bad = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "promt": 1}, "promt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ]
    async with running_mesh() as mesh:
        for path, body, field in bad:
            answer = await mesh.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_token_routes_need_a_key_and_descriptions_do_not() -> None:
    keys = (ApiKeyConfig.model_validate({"name": "alice", "key": "alice-secret"}),)
    async with running_mesh(api_keys=keys) as mesh:
        for path in ("/tokenize", "/detokenize"):
            assert (await mesh.http.post(path, json={"prompt": "a"})).status_code == 401
        assert (await mesh.http.get("/v1/models/oracle")).status_code == 401
        for path in ("/version", "/openapi.json", "/docs"):
            assert (await mesh.http.get(path)).status_code == 200
        assert "version" in (await mesh.http.get("/version")).json()


async def test_the_description_has_every_route_and_field() -> None:
    async with running_mesh() as mesh:
        document = (await mesh.http.get("/openapi.json")).json()
        assert document["openapi"] == "3.1.0"
        for operation in OPERATIONS:
            path = operation.path.replace("{model}", "oracle")
            answer = await mesh.http.request(operation.method, path)
            assert "unknown_url" not in answer.text, path
        fields = document["components"]["schemas"]["ChatCompletionBody"]["properties"]
        assert set(Sampling.__struct_fields__) | {"messages", "stream", "stop"} <= set(fields)
        page = await mesh.http.get("/docs")
        assert "/v1/chat/completions" in page.text
        assert "ChatCompletionBody" in page.text
        assert page.headers["content-type"].startswith("text/html")


async def test_pages_of_other_origins_may_call_if_allowed() -> None:
    preflight = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with running_mesh() as mesh:
        answer = await mesh.http.get("/v1/models", headers=ORIGIN)
        assert "access-control-allow-origin" not in answer.headers
    async with running_mesh(http=HttpConfig(cors_origins=("https://app.example",))) as mesh:
        answer = await mesh.http.options("/v1/chat/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        body = {"messages": HELLO, "max_tokens": 2, "stream": True}
        streamed = await mesh.http.post("/v1/chat/completions", json=body, headers=ORIGIN)
        assert streamed.headers["access-control-allow-origin"] == "https://app.example"
        assert streamed.text.rstrip().endswith("data: [DONE]")
        other = await mesh.http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site", **ORIGIN}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "https://proxied.example"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, 200),
        ({"host": "app.example"}, 200),
        # A name of an attacker's that leads to this machine.
        ({"origin": "http://evil.example:8000", "host": "evil.example:8000"}, 403),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "http://["}, 403),
    ],
)
async def test_other_pages_generate_nothing(headers: dict[str, str], status: int) -> None:
    """A page may send text/plain anywhere without asking first."""
    async with running_mesh(http=HttpConfig(cors_origins=("https://app.example",))) as mesh:
        sent = {"content-type": "text/plain", **headers}
        answer = await mesh.http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=sent)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] in ("origin_not_allowed", "host_not_allowed")


async def test_names_are_checked_only_where_nothing_else_protects() -> None:
    named = {"host": "mesh.example"}
    async with running_mesh() as mesh:
        assert (await mesh.http.get("/v1/models", headers=named)).status_code == 403
    keys = (ApiKeyConfig.model_validate({"name": "alice", "key": "alice-secret"}),)
    async with running_mesh(api_keys=keys) as mesh:
        authorized = {"authorization": "Bearer alice-secret", **named}
        assert (await mesh.http.get("/v1/models", headers=authorized)).status_code == 200

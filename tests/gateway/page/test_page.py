"""The operators' page without a browser: what it is made of, what it tells, and whom it serves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from gateway.config import ApiKeyConfig, GatewayServerConfig
from gateway.page.server import FILES, POLICY, operator_server
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tests.support.gateways import ids_request, running_mesh

QUESTION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@asynccontextmanager
async def page(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the page, after one answer of three tokens."""
    async with running_mesh(server=GatewayServerConfig(metrics_port=free_port()), **settings) as mesh:
        async for _ in mesh.stub.Generate(ids_request(max_tokens=3), timeout=60, metadata=AUTHORIZED):
            pass
        async with (
            operator_server(mesh.gateway.config, mesh.gateway, Channels()) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
        ):
            yield client


AUTHORIZED = (("authorization", "Bearer alice-secret"),)


async def events(client: httpx.AsyncClient) -> dict[str, Any]:
    """The first of each kind."""
    found: dict[str, Any] = {}
    async with client.stream("GET", "/live") as response:
        name = ""
        async for line in response.aiter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                found.setdefault(name, json.loads(value))
            if len(found) == 2:
                break
    return found


async def test_it_shows_the_mesh_its_last_placements_and_answers() -> None:
    async with page() as client:
        shown = await events(client)
    mesh = shown["mesh"]
    assert [worker["worker_id"] for worker in mesh["workers"]] == ["decode-0"]
    assert (mesh["workers"][0]["role"], mesh["workers"][0]["ranks"]) == ("decode", [])
    assert (mesh["problem"], mesh["keys"], mesh["live"], mesh["received_tokens"]) == ("", False, 0, 3)
    assert [decision["worker_id"] for decision in mesh["decisions"]] == ["decode-0"]
    [[_, ttft, tpot, prompt, cached, output, outcome]] = shown["answers"]
    assert ttft > 0 and tpot >= 0
    assert (prompt, cached, output, outcome) == (3, 0, 3, "finished")


async def test_it_says_when_the_scheduler_does_not_answer() -> None:
    async with running_mesh(server=GatewayServerConfig(metrics_port=free_port())) as mesh:
        await mesh.scheduler_server.__aexit__(None, None, None)
        async with (
            operator_server(mesh.gateway.config, mesh.gateway, Channels()) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
        ):
            assert (await events(client))["mesh"]["problem"]


async def test_it_shows_what_the_scheduler_that_places_knows() -> None:
    async with page(more_schedulers=(free_port(),)) as client:
        mesh = (await events(client))["mesh"]
    assert (mesh["problem"], [worker["worker_id"] for worker in mesh["workers"]]) == ("", ["decode-0"])


@pytest.mark.parametrize("path", FILES)
async def test_its_files_have_a_policy_against_other_hosts(path: str) -> None:
    async with page() as client:
        response = await client.get(path)
    assert response.status_code == 200
    assert response.headers["content-security-policy"] == POLICY
    assert "//" not in POLICY and "unsafe" not in POLICY


async def test_the_playground_answers() -> None:
    async with page() as client:
        response = await client.post("/v1/chat/completions", json=QUESTION)
    assert response.json()["usage"]["completion_tokens"] == 3


async def test_with_keys_the_playground_needs_one() -> None:
    keys = (ApiKeyConfig(name="alice", key=SecretStr("alice-secret")),)
    async with page(api_keys=keys) as client:
        refused = await client.post("/v1/chat/completions", json=QUESTION)
        taken = await client.post("/v1/chat/completions", json=QUESTION, headers=dict(AUTHORIZED))
        shown = await events(client)
    assert (refused.status_code, taken.status_code) == (401, 200)
    assert shown["mesh"]["keys"] is True


async def test_the_metrics_are_beside_it() -> None:
    async with page() as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "deepmesh_gateway_accepted_total{" in response.text


async def test_other_pages_neither_read_nor_ask() -> None:
    async with page() as client:
        read = await client.get("/metrics", headers={"host": "evil.example"})
        asked = await client.post("/v1/chat/completions", json=QUESTION, headers={"origin": "https://evil.example"})
    assert (read.status_code, asked.status_code) == (403, 403)
    # Nothing that an operator may set changes that.
    assert "cors_origins" not in read.text + asked.text


async def test_pages_that_watch_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.page.server.MOST_WATCHERS", 2)
    async with page() as client, AsyncExitStack() as stack:
        requests = [client.build_request("GET", "/live") for _ in range(5)]
        responses = await asyncio.gather(*(client.send(request, stream=True) for request in requests))
        for response in responses:
            stack.push_async_callback(response.aclose)
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429, 429]

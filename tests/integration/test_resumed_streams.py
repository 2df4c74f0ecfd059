"""Streams that are resumed at another gateway of a mesh of real processes. Every token is compared."""

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from engine.oracle.tokens import oracle_tokens
from launcher.plan import HOST
from mesh.rpc.failures import from_rpc_error
from tests.support.mesh_requests import ANSWER_SECONDS, forget, kill, prompt_of, request_of
from tests.support.process_mesh import VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEYS = 'gateway.api_keys=[{"name": "alice", "key": "alice-secret"}, {"name": "bob", "key": "bob-secret"}]'
ALICE, BOB = (("authorization", "Bearer alice-secret"),), (("authorization", "Bearer bob-secret"),)
PROMPT, TOKENS = prompt_of(150, 1), 300
EXPECTED = oracle_tokens(PROMPT, TOKENS, VOCABULARY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[ProcessMesh]:
    settings = (*oracle_settings(**{"oracle.step_ms": 5}), KEYS, "scheduler.lease.seconds=10")
    async with process_mesh(workers=2, gateways=2, settings=settings, api_key="alice-secret") as running:
        yield running


def stub_of(channel: grpc.aio.Channel) -> gateway_pb2_grpc.GatewayServiceStub:
    return gateway_pb2_grpc.GatewayServiceStub(channel)


def gateway_channel(mesh: ProcessMesh, number: int) -> grpc.aio.Channel:
    _, grpc_port = mesh.plan.gateway_ports[number]
    return grpc.aio.insecure_channel(f"{HOST}:{grpc_port}")


async def begun(stub: gateway_pb2_grpc.GatewayServiceStub, tokens: int) -> tuple[Any, str, list[int]]:
    """A stream of which at least `tokens` tokens were read: the call, its stream token, and the tokens read."""
    call = stub.Generate(request_of(PROMPT, TOKENS), metadata=ALICE, timeout=ANSWER_SECONDS)
    started = await call.read()
    found: list[int] = []
    while len(found) < tokens:
        found.extend((await call.read()).delta.token_ids)
    return call, started.started.stream_token, found


async def resumed(
    stub: gateway_pb2_grpc.GatewayServiceStub, request: gateway_pb2.ResumeRequest, metadata: Any = ALICE
) -> list[int]:
    call = stub.Resume(request, metadata=metadata, timeout=ANSWER_SECONDS)
    return [token async for message in call for token in message.response.delta.token_ids]


async def refusal(stub: gateway_pb2_grpc.GatewayServiceStub, token: str, metadata: Any = ALICE) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await resumed(stub, gateway_pb2.ResumeRequest(stream_token=token), metadata)
    return from_rpc_error(caught.value).reason


async def until_back(mesh: ProcessMesh) -> None:
    """Wait until the first gateway has been started again and serves."""
    http_port, _ = mesh.plan.gateway_ports[0]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:

        async def serves() -> bool:
            with suppress(httpx.TransportError):
                return (await client.get(f"http://{HOST}:{http_port}/health")).is_success
            return False

        await eventually(serves)


async def test_a_stream_whose_gateway_is_killed_goes_on_at_another(mesh: ProcessMesh) -> None:
    async with gateway_channel(mesh, 0) as first, gateway_channel(mesh, 1) as second:
        _, token, found = await begun(stub_of(first), 50)
        kill(mesh, "gateway")
        found += await resumed(stub_of(second), gateway_pb2.ResumeRequest(stream_token=token, position=len(found)))
        assert found == EXPECTED
        # The stream's end is kept: the same position gives the same tokens again.
        again = await resumed(stub_of(second), gateway_pb2.ResumeRequest(stream_token=token, position=290))
        assert again == EXPECTED[290:]
        await until_back(mesh)


async def test_a_second_presenter_ends_the_first_and_has_every_token(mesh: ProcessMesh) -> None:
    async with gateway_channel(mesh, 0) as first, gateway_channel(mesh, 1) as second:
        call, token, found = await begun(stub_of(first), 20)
        rest = await resumed(stub_of(second), gateway_pb2.ResumeRequest(stream_token=token, position=len(found)))
        assert found + rest == EXPECTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert from_rpc_error(caught.value).reason == "STREAM_TAKEN"


async def test_a_stream_without_a_log_is_computed_again(mesh: ProcessMesh) -> None:
    async with gateway_channel(mesh, 1) as channel:
        stub = stub_of(channel)
        call, token, found = await begun(stub, 20)
        call.cancel()
        await forget(mesh, "decode-0", "decode-1")
        assert await refusal(stub, token) == "STREAM_GONE"
        request = gateway_pb2.ResumeRequest(stream_token=token, position=len(found), request=request_of(PROMPT, TOKENS))
        assert found + await resumed(stub, request) == EXPECTED


async def test_forged_tokens_and_those_of_other_tenants_are_refused(mesh: ProcessMesh) -> None:
    async with gateway_channel(mesh, 1) as channel:
        stub = stub_of(channel)
        call, token, _ = await begun(stub, 5)
        assert await refusal(stub, token, BOB) == "UNKNOWN_STREAM"
        other = "A" if token[20] != "A" else "B"
        for forged in (token[:-2], token[1:], "", "x" * 5000, "ключ", token[:20] + other + token[21:]):
            assert await refusal(stub, forged) == "UNKNOWN_STREAM"
        call.cancel()


async def test_an_http_stream_continues_at_another_gateway(mesh: ProcessMesh) -> None:
    headers = {"authorization": "Bearer alice-secret"}
    body = {"model": "oracle", "prompt": "abc", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    first, second = (f"http://{HOST}:{http_port}" for http_port, _ in mesh.plan.gateway_ports)
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:
        whole = (await client.post(f"{second}/v1/completions", json=body)).json()["choices"][0]["text"]
        text, last_id = "", ""
        async with client.stream("POST", f"{first}/v1/completions", json={**body, "stream": True}) as response:
            token = response.headers["x-deepmesh-stream"]
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    last_id = line[4:]
                elif line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if int(last_id) >= 30:
                        break
        after = await client.get(f"{second}/v1/streams/{token}", headers={"last-event-id": last_id})
        events = [line[6:] for line in after.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        text += "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert text == whole
        for wrong in ("-3", "101"):
            refused = await client.get(f"{second}/v1/streams/{token}", headers={"last-event-id": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last-event-id"), wrong

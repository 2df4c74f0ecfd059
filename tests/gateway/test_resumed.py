"""Streams that are gone on with where no worker has their log: they are computed again."""

import grpc
import pytest
from deepmesh.v1 import gateway_pb2
from pydantic import SecretStr

from gateway.config import ApiKeyConfig
from mesh.config import ObserveConfig
from tests.support.fake_decode import oracle_tokens
from tests.support.gateways import Mesh, ids_request, running_mesh

AUTHORIZED = (("authorization", "Bearer alice-secret"),)


async def begun(mesh: Mesh, request: gateway_pb2.GenerateRequest) -> str:
    """The token of a stream that has been answered."""
    responses = [each async for each in mesh.stub.Generate(request, timeout=60, metadata=AUTHORIZED)]
    return responses[0].started.stream_token


async def resumed(mesh: Mesh, token: str, request: gateway_pb2.GenerateRequest, position: int) -> list[int]:
    """The token ids after the position."""
    asked = gateway_pb2.ResumeRequest(stream_token=token, position=position, request=request)
    responses = [each.response async for each in mesh.stub.Resume(asked, timeout=60, metadata=AUTHORIZED)]
    return [token_id for each in responses for token_id in each.delta.token_ids]


async def test_the_rest_of_the_answer_comes() -> None:
    async with running_mesh() as mesh:
        token = await begun(mesh, ids_request())
        assert await resumed(mesh, token, ids_request(), 3) == oracle_tokens([5, 6, 7], 8)[3:]


async def test_a_prompt_that_is_computed_again_is_charged_again() -> None:
    keys = (ApiKeyConfig(name="alice", key=SecretStr("alice-secret"), tokens_per_minute=500),)
    request = ids_request([5] * 300)
    async with running_mesh(api_keys=keys) as mesh:
        token = await begun(mesh, request)
        await resumed(mesh, token, request, 8)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begun(mesh, request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_it_is_traced_as_other_requests_are() -> None:
    async with running_mesh(observe=ObserveConfig(otlp_endpoint="http://127.0.0.1:9", trace_share=1.0)) as mesh:
        await resumed(mesh, await begun(mesh, ids_request()), ids_request(), 3)
        assert all(submission.traceparent for submission in mesh.worker.submissions)

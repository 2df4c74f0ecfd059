"""What GatewayService refuses: bad requests, unknown callers, and more than there is room for."""

import math
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from deepmesh.v1 import common_pb2, gateway_pb2
from pydantic import SecretStr

from gateway.config import ApiKeyConfig, LimitsConfig
from mesh.errors import InvalidRequest, NoWorker, Overloaded
from mesh.rpc.failures import from_rpc_error
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import Mesh, chat_request, collect, direct, dispatch, ids_request, running_mesh
from tests.support.refusals import refused
from tests.support.waiting import eventually

Sampling = common_pb2.SamplingParams
BAD_REQUESTS = {
    "no prompt": (gateway_pb2.GenerateRequest(), "prompt"),
    "empty text": (gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text="")), "prompt"),
    "no token ids": (ids_request([]), "prompt"),
    "token id out of range": (ids_request([1, 1000]), "prompt"),
    "no messages": (gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(chat=gateway_pb2.Chat())), "messages"),
    "unknown role": (chat_request(role="wizard"), "messages[0].role"),
    "negative temperature": (ids_request(sampling=Sampling(temperature=-1)), "temperature"),
    "temperature not a number": (ids_request(sampling=Sampling(temperature=math.nan)), "temperature"),
    "infinite temperature": (ids_request(sampling=Sampling(temperature=math.inf)), "temperature"),
    "bad top_p": (ids_request(sampling=Sampling(top_p=1.5)), "top_p"),
    "bad top_k": (ids_request(sampling=Sampling(top_k=2**32 - 1)), "top_k"),
    "bad min_p": (ids_request(sampling=Sampling(min_p=1.5)), "min_p"),
    "bad presence_penalty": (ids_request(sampling=Sampling(presence_penalty=3)), "presence_penalty"),
    "bad frequency_penalty": (ids_request(sampling=Sampling(frequency_penalty=math.nan)), "frequency_penalty"),
    "repetition_penalty of zero": (ids_request(sampling=Sampling(repetition_penalty=0)), "repetition_penalty"),
    "bias of an unknown token": (ids_request(sampling=Sampling(logit_bias={5000: 1})), "logit_bias"),
    "too many logprobs": (ids_request(sampling=Sampling(top_logprobs=21)), "top_logprobs"),
    "empty stop string": (ids_request(stop=[""]), "stop"),
    "too many stop strings": (ids_request(stop=["a"] * 17), "stop"),
    "stop token out of range": (ids_request(stop_token_ids=[1000]), "stop_token_ids"),
    "over the context": (ids_request([1] * 10, max_tokens=5000), "max_tokens"),
    "prompt over the context": (ids_request([1] * 4096, max_tokens=0), "prompt"),
    "too many characters": (chat_request("a" * 1_000_001), "messages"),
}


async def test_bad_requests_are_refused_by_field() -> None:
    async with running_mesh() as mesh:
        for name, (request, field) in BAD_REQUESTS.items():
            error = await refused(collect(mesh, request))
            assert (error.code.name, error.metadata.get("field")) == ("INVALID_ARGUMENT", field), name
        assert mesh.scheduler.queries == []


async def test_biases_are_counted_before_they_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.domain.wire.sampling", lambda _: pytest.fail("they were converted"))
    async with running_mesh() as mesh:
        error = await refused(collect(mesh, ids_request(sampling=Sampling(logit_bias=dict.fromkeys(range(301), 1)))))
        assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", "logit_bias")


async def test_exceeding_the_context_has_its_own_reason() -> None:
    async with running_mesh() as mesh:
        assert (await refused(collect(mesh, ids_request(max_tokens=5000)))).reason == "CONTEXT_EXCEEDED"


async def test_an_unknown_model_is_refused() -> None:
    async with running_mesh() as mesh:
        error = await refused(collect(mesh, ids_request(model="gpt-7")))
        assert (error.code.name, error.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")


async def test_a_model_without_workers_makes_no_request_ambiguous() -> None:
    leaving, staying = FakeDecodeWorker(model="old"), FakeDecodeWorker(worker_id="decode-1", model="new")
    async with running_mesh(leaving, staying, texts={}, dispatch=dispatch(worker_seconds=0.3)) as mesh:
        await eventually(lambda: mesh.gateway.directory.models() == ["new", "old"])
        error = await refused(collect(mesh, ids_request()))
        assert (error.code.name, error.message) == ("INVALID_ARGUMENT", "name a model: this mesh serves new, old")
        mesh.scheduler.remove("decode-0")
        await eventually(lambda: mesh.gateway.directory.models() == ["new"])
        assert (await collect(mesh, ids_request())).started.model == "new"
        assert (await refused(collect(mesh, ids_request(model="old")))).reason == "UNKNOWN_MODEL"


async def test_invalid_utf8_on_the_wire_is_refused() -> None:
    async with running_mesh() as mesh, grpc.aio.insecure_channel(f"127.0.0.1:{mesh.grpc_port}") as channel:
        call: Any = channel.unary_stream("/deepmesh.v1.GatewayService/Generate")
        malformed_text = b"\x12\x04\x0a\x02\xff\xfe"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(malformed_text, timeout=10).read()
        assert isinstance(from_rpc_error(caught.value), InvalidRequest)
        assert "UTF-8" in str(caught.value.details())


async def test_a_full_gateway_refuses_with_a_delay() -> None:
    worker = FakeDecodeWorker(step_seconds=0.01)
    async with running_mesh(worker, limits=LimitsConfig(live_generations=1)) as mesh:
        first = mesh.stub.Generate(ids_request(max_tokens=1000))
        await first.read()
        error = await refused(collect(mesh, ids_request()))
        assert (error.code.name, error.retry_after_ms) == ("RESOURCE_EXHAUSTED", 1000)
        first.cancel()


@direct
async def test_what_the_scheduler_refuses_with_reaches_the_client() -> None:
    async with running_mesh(dispatch=dispatch(worker_seconds=0)) as mesh:
        for refusal in (Overloaded("full", retry_after_ms=2500), NoWorker("none")):
            mesh.scheduler.refusals.append(refusal)
            error = await refused(collect(mesh, ids_request()))
            assert (type(error), error.message, error.retry_after_ms) == (
                type(refusal),
                refusal.message,
                refusal.retry_after_ms,
            )


def keyed(mesh: Mesh, key: str | None, request: gateway_pb2.GenerateRequest) -> Awaitable[object]:
    return collect(mesh, request, metadata=(("authorization", f"Bearer {key}"),) if key else ())


async def test_keys_are_required_and_separate_caches() -> None:
    keys = (
        ApiKeyConfig(name="alice", key=SecretStr("alice-secret")),
        ApiKeyConfig(name="bob", key=SecretStr("bob-secret")),
    )
    async with running_mesh(api_keys=keys) as mesh:
        for key in (None, "mallory-secret"):
            assert (await refused(keyed(mesh, key, ids_request()))).code.name == "UNAUTHENTICATED"
        assert (await refused(mesh.stub.ListModels(gateway_pb2.ListModelsRequest()))).reason == "UNAUTHENTICATED"
        for key in ("alice-secret", "bob-secret"):
            await keyed(mesh, key, ids_request([1] * 64))
        assert [submission.cache_salt for submission in mesh.worker.submissions] == [b"alice", b"bob"]
        first, second = (query.block_hashes[0] for query in mesh.scheduler.queries)
        assert first != second


async def test_only_a_tenant_over_its_share_is_refused() -> None:
    keys = (
        ApiKeyConfig(name="alice", key=SecretStr("alice-secret"), max_concurrent=1),
        ApiKeyConfig(name="bob", key=SecretStr("bob-secret")),
    )
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01), api_keys=keys) as mesh:
        metadata = (("authorization", "Bearer alice-secret"),)
        first = mesh.stub.Generate(ids_request(max_tokens=1000), metadata=metadata)
        await first.read()
        assert (await refused(keyed(mesh, "alice-secret", ids_request()))).code.name == "RESOURCE_EXHAUSTED"
        await keyed(mesh, "bob-secret", ids_request())
        first.cancel()
        await mesh.drained()
        await keyed(mesh, "alice-secret", ids_request())

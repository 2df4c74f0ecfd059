"""GatewayService over real gRPC, before fake workers. Every `running_mesh` asserts at its end that nothing is left."""

import asyncio
import math
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from deepmesh.v1 import common_pb2, gateway_pb2
from pydantic import SecretStr, ValidationError

from gateway.config import ApiKeyConfig, LimitsConfig
from mesh.errors import InvalidRequest, MeshError, NoWorker, Overloaded
from mesh.failures import from_rpc_error
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens, scripted
from tests.support.gateways import (
    MODEL,
    Mesh,
    chat_request,
    collect,
    direct,
    dispatch,
    ids_request,
    model_texts,
    running_mesh,
)
from tests.support.oracle_texts import spelled
from tests.support.waiting import eventually

Sampling = common_pb2.SamplingParams
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def answering(text: str, **fields: Any) -> FakeDecodeWorker:
    return FakeDecodeWorker(next_token=scripted(spelled(text)), **fields)


async def refused(call: Awaitable[object]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_token_ids_go_in_and_come_out() -> None:
    async with running_mesh() as mesh:
        answer = await collect(mesh, ids_request([5, 6, 7], max_tokens=20))
        assert answer.token_ids == oracle_tokens([5, 6, 7], 20)
        assert answer.finished.finish_reason == LENGTH
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 20)


def test_rounds_are_never_closer_than_a_clock_can_tell() -> None:
    for rate in (math.inf, 1e308):
        with pytest.raises(ValidationError):
            LimitsConfig(messages_per_second=rate)


async def test_tokens_that_come_faster_than_messages_may_share_one() -> None:
    # A message in a tenth of a second; the tokens take a fifth.
    async with running_mesh(FakeDecodeWorker(step_seconds=0.005), limits=LimitsConfig(messages_per_second=10)) as mesh:
        answer = await collect(mesh, ids_request([5, 6, 7], max_tokens=40))
        assert answer.token_ids == oracle_tokens([5, 6, 7], 40)
        assert 2 <= len(answer.deltas) <= 10


async def test_text_begins_with_the_beginning_of_sequence() -> None:
    async with running_mesh() as mesh:
        await collect(mesh, gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text="hi"), max_tokens=1))
        assert list(mesh.worker.submissions[0].token_ids) == [0, *spelled("hi")]


async def test_a_chat_is_rendered_and_its_answer_is_text() -> None:
    async with running_mesh(answering("héllo 🤖")) as mesh:
        answer = await collect(mesh, chat_request("hi", max_tokens=len(spelled("héllo 🤖"))))
        assert answer.text == "héllo 🤖"
        submitted = list(mesh.worker.submissions[0].token_ids)
        assert submitted == spelled("<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>")


async def test_a_stop_string_in_the_reasoning_ends_the_answer_there() -> None:
    async with running_mesh(answering("why STOP</think>because")) as mesh:
        request = chat_request("hi", max_tokens=16, stop=["STOP"])
        request.prompt.chat.thinking = True
        answer = await collect(mesh, request)
        assert (answer.text, answer.reasoning) == ("", "why ")
        assert answer.finished.stop_string == "STOP"


async def test_reasoning_that_was_not_asked_for_leaves_no_tag_in_the_answer() -> None:
    async with running_mesh(answering("why</think>because")) as mesh:
        request = chat_request("hi", max_tokens=11)
        request.prompt.chat.thinking = False
        answer = await collect(mesh, request)
        assert (answer.reasoning, answer.text) == ("", "why\n\nbecause")


async def test_reasoning_stands_apart_and_is_counted() -> None:
    async with running_mesh(answering("why</think>because")) as mesh:
        request = chat_request("hi", max_tokens=11)
        request.prompt.chat.thinking = True
        answer = await collect(mesh, request)
        assert (answer.reasoning, answer.text) == ("why", "because")
        assert answer.usage.reasoning_tokens == 4


async def test_a_stop_string_ends_the_text_and_the_work() -> None:
    async with running_mesh(answering("one STOP two", step_seconds=0.005)) as mesh:
        answer = await collect(mesh, chat_request(stop=["STOP"], max_tokens=1000))
        assert (answer.text, answer.finished.stop_string) == ("one ", "STOP")
        assert answer.finished.finish_reason == STOP
        assert answer.usage.completion_tokens == len(spelled("one STOP"))
        await eventually(lambda: mesh.worker.cancelled == [mesh.worker.submissions[0].stream_id])


async def test_the_end_of_sequence_is_reported_and_is_not_text() -> None:
    async with running_mesh(answering("done<｜end▁of▁sentence｜>", eos_token_id=1)) as mesh:
        answer = await collect(mesh, chat_request(max_tokens=100))
        assert (answer.text, answer.finished.stop_token_id) == ("done", 1)


async def test_sampling_reaches_the_worker() -> None:
    async with running_mesh() as mesh:
        sampling = Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            seed=2**63 + 5,
            top_logprobs=3,
            min_p=0.125,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            logit_bias={7: -100.0, 8: 2.5},
            drafts=common_pb2.DRAFT_USE_OFF,
        )
        answer = await collect(mesh, ids_request(sampling=sampling, stop_token_ids=[3], ignore_eos=True))
        submission = mesh.worker.submissions[0]
        assert submission.sampling == sampling
        assert (list(submission.stop.token_ids), submission.stop.ignore_eos) == ([3], True)
        logprobs = [entry for delta in answer.deltas for entry in delta.logprobs]
        assert [entry.top[0].token_id for entry in logprobs] == answer.token_ids
        assert [entry.token_id for entry in logprobs] == answer.token_ids
        tokenizer = model_texts()[MODEL].tokenizer
        assert tokenizer is not None
        for entry in logprobs:
            assert entry.text == tokenizer.token_text(entry.token_id) != ""
            assert [top.text for top in entry.top] == [tokenizer.token_text(top.token_id) for top in entry.top]
        assert [len(entry.top) for entry in logprobs] == [3] * 8


async def test_defaults_are_greedy_with_every_token_and_a_drawn_seed() -> None:
    async with running_mesh() as mesh:
        await asyncio.gather(collect(mesh, ids_request()), collect(mesh, ids_request()))
        first, second = (submission.sampling for submission in mesh.worker.submissions)
        assert (first.temperature, first.top_p, first.top_k) == (0.0, 1.0, 0)
        assert first.seed != second.seed
        assert first.drafts == common_pb2.DRAFT_USE_RELAXED


async def test_a_seed_is_not_to_suffer_by_drafts() -> None:
    async with running_mesh() as mesh:
        await collect(mesh, ids_request(sampling=Sampling(seed=5)))
        assert mesh.worker.submissions[0].sampling.drafts == common_pb2.DRAFT_USE_STRICT


async def test_without_max_tokens_the_context_is_filled() -> None:
    async with running_mesh(FakeDecodeWorker(context_tokens=30)) as mesh:
        answer = await collect(mesh, ids_request([1] * 10, max_tokens=0))
        assert answer.usage.completion_tokens == 20


async def test_the_request_id_goes_from_the_client_to_the_worker() -> None:
    async with running_mesh() as mesh:
        answer = await collect(mesh, ids_request(), metadata=(("x-request-id", "mine-1"),))
        assert answer.started.request_id == mesh.worker.submissions[0].request_id == "mine-1"
        assert mesh.scheduler.queries[0].request_id == "mine-1"


async def test_outcomes_are_reported_to_the_scheduler() -> None:
    async with running_mesh() as mesh:
        await collect(mesh, ids_request([1] * 64, max_tokens=5))
        await eventually(lambda: len(mesh.scheduler.outcomes) == 1)
        outcome = mesh.scheduler.outcomes[0]
        assert (outcome.outcome, outcome.output_tokens, outcome.cached_tokens, outcome.worker_id) == (
            *(1, 5, 64),
            "decode-0",
        )


async def test_the_prompts_blocks_are_hashed_for_placement() -> None:
    async with running_mesh() as mesh:
        await collect(mesh, ids_request([1] * 130))
        await collect(mesh, ids_request([1] * 70))
        long, short = (query.block_hashes for query in mesh.scheduler.queries)
        assert (len(long), list(short)) == (2, long[:1])


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


async def test_bad_requests_are_refused_by_field_and_never_reach_the_mesh() -> None:
    async with running_mesh() as mesh:
        for name, (request, field) in BAD_REQUESTS.items():
            error = await refused(collect(mesh, request))
            assert (error.code.name, error.metadata.get("field")) == ("INVALID_ARGUMENT", field), name
        assert mesh.scheduler.queries == []


async def test_prompt_and_max_tokens_over_the_context_have_a_reason_of_their_own() -> None:
    async with running_mesh() as mesh:
        assert (await refused(collect(mesh, ids_request(max_tokens=5000)))).reason == "CONTEXT_EXCEEDED"


async def test_an_unknown_model_is_refused() -> None:
    async with running_mesh() as mesh:
        error = await refused(collect(mesh, ids_request(model="gpt-7")))
        assert (error.code.name, error.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")


async def test_a_model_whose_workers_are_gone_no_longer_makes_requests_ambiguous() -> None:
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


async def test_a_model_without_a_tokenizer_takes_and_gives_token_ids() -> None:
    async with running_mesh(texts={}) as mesh:
        answer = await collect(mesh, ids_request())
        assert answer.token_ids == oracle_tokens([5, 6, 7], 8)
        assert answer.text == ""
        for request in (chat_request(), gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text="hi"))):
            assert "served without a tokenizer: send token ids" in (await refused(collect(mesh, request))).message
        assert (await refused(collect(mesh, ids_request(stop=["a"])))).metadata["field"] == "stop"


async def test_a_client_that_cancels_stops_the_work() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.005)) as mesh:
        call = mesh.stub.Generate(ids_request(max_tokens=3000))
        await call.read()
        await call.read()
        call.cancel()
        await eventually(lambda: len(mesh.worker.cancelled) == 1)


async def test_a_deadline_of_one_millisecond_ends_in_time_and_leaves_nothing() -> None:
    async with running_mesh() as mesh:
        error = await refused(collect(mesh, ids_request(), timeout=0.001))
        assert error.code.name == "DEADLINE_EXCEEDED"


async def test_a_deadline_during_the_answer_stops_the_work() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        # Where the machine is so busy that it ended before the answer began, once more.
        while not mesh.worker.submissions:
            error = await refused(collect(mesh, ids_request(max_tokens=4000), timeout=0.5))
            assert error.code.name == "DEADLINE_EXCEEDED"
        assert 0 < mesh.worker.submissions[0].deadline_ms <= 500


async def test_the_gateways_own_deadline_holds_where_the_client_sets_none() -> None:
    limits = LimitsConfig(generation_seconds=0.2)
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01), limits=limits) as mesh:
        error = await refused(collect(mesh, ids_request(max_tokens=4000), timeout=None))
        assert (error.code.name, error.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")


@direct
async def test_a_client_that_does_not_read_is_cut_off_and_others_are_not() -> None:
    worker = FakeDecodeWorker(context_tokens=200_000, tokens_per_step=50)
    async with running_mesh(worker, limits=LimitsConfig(unread_tokens=500)) as mesh:
        idle = mesh.stub.Generate(ids_request(max_tokens=150_000, sampling=Sampling(top_logprobs=20)))
        await idle.read()
        await eventually(lambda: len(worker.cancelled) == 1, 60)
        answer = await collect(mesh, ids_request(max_tokens=100))
        assert answer.token_ids == oracle_tokens([5, 6, 7], 100)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await idle.read() is not grpc.aio.EOF:
                pass
        assert from_rpc_error(caught.value).reason == "SLOW_CLIENT"


async def test_a_client_that_stops_reading_a_short_answer_is_cut_off_after_a_while() -> None:
    worker = FakeDecodeWorker(context_tokens=200_000, tokens_per_step=50)
    limits = LimitsConfig(unread_tokens=1_000_000, stalled_seconds=0.3)
    async with running_mesh(worker, limits=limits) as mesh:
        idle = mesh.stub.Generate(ids_request(max_tokens=2000, sampling=Sampling(top_logprobs=20)))
        await idle.read()
        await eventually(lambda: mesh.gateway.dispatcher.live_generations == 1)
        await eventually(lambda: mesh.gateway.dispatcher.live_generations == 0)
        idle.cancel()


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


async def test_the_models_that_workers_serve_are_listed() -> None:
    workers = (FakeDecodeWorker(), FakeDecodeWorker(worker_id="decode-1"))
    async with running_mesh(*workers) as mesh:
        await eventually(lambda: len(mesh.gateway.directory.incarnations()) == 2)
        (model,) = (await mesh.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        assert (model.name, model.context_tokens, model.vocabulary_size, model.workers) == ("oracle", 4096, 1000, 2)


async def test_tokens_are_counted_as_generate_would() -> None:
    async with running_mesh() as mesh:
        request = chat_request("how many?")
        counted = await mesh.stub.CountTokens(gateway_pb2.CountTokensRequest(prompt=request.prompt))
        answer = await collect(mesh, request)
        assert counted.tokens == len(counted.token_ids) == answer.usage.prompt_tokens
        assert list(counted.token_ids) == list(mesh.worker.submissions[0].token_ids)


def keyed(mesh: Mesh, key: str | None, request: gateway_pb2.GenerateRequest) -> Awaitable[object]:
    return collect(mesh, request, metadata=(("authorization", f"Bearer {key}"),) if key else ())


async def test_keys_are_required_where_there_are_any_and_separate_the_caches() -> None:
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


async def test_a_tenant_over_its_share_is_refused_and_others_are_not() -> None:
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

"""GatewayService over real gRPC, before fake workers. Every `running_mesh` asserts at its end that nothing is left."""

import asyncio
import math
from typing import Any

import pytest
from deepmesh.v1 import common_pb2, gateway_pb2
from pydantic import ValidationError

from gateway.config import LimitsConfig
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens, scripted
from tests.support.gateways import MODEL, chat_request, collect, ids_request, model_texts, running_mesh
from tests.support.oracle_texts import spelled
from tests.support.refusals import refused
from tests.support.waiting import eventually

Sampling = common_pb2.SamplingParams
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def answering(text: str, **fields: Any) -> FakeDecodeWorker:
    return FakeDecodeWorker(next_token=scripted(spelled(text)), **fields)


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


async def test_unasked_reasoning_leaves_no_tag() -> None:
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


async def test_a_model_without_a_tokenizer_takes_and_gives_token_ids() -> None:
    async with running_mesh(texts={}) as mesh:
        answer = await collect(mesh, ids_request())
        assert answer.token_ids == oracle_tokens([5, 6, 7], 8)
        assert answer.text == ""
        for request in (chat_request(), gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text="hi"))):
            assert "served without a tokenizer: send token ids" in (await refused(collect(mesh, request))).message
        assert (await refused(collect(mesh, ids_request(stop=["a"])))).metadata["field"] == "stop"


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

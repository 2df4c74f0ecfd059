"""The OpenAI API over real HTTP, with the `openai` package and plain requests, before fake workers."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from deepmesh.v1 import common_pb2

from gateway.config import ApiKeyConfig
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens
from tests.support.gateways import collect, ids_request, running_mesh
from tests.support.openai_calls import CHAT, COMPLETIONS, HELLO, client
from tests.support.oracle_texts import answering, spelled
from tests.support.waiting import eventually


async def test_a_chat_is_answered_whole() -> None:
    async with running_mesh(answering("héllo 🤖<｜end▁of▁sentence｜>")) as mesh:
        answer = await client(mesh).chat.completions.create(model="oracle", messages=HELLO)
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.role, choice.finish_reason) == ("héllo 🤖", "assistant", "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(spelled("héllo 🤖")) + 1
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_chat_is_streamed_with_usage_at_the_end() -> None:
    async with running_mesh(answering("héllo 🤖<｜end▁of▁sentence｜>")) as mesh:
        stream = await client(mesh).chat.completions.create(
            model="oracle", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "héllo 🤖"
        assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "stop"]
        assert (chunks[-1].choices, chunks[-1].usage is not None) == ([], True)
        assert len({chunk.id for chunk in chunks}) == 1


async def test_reasoning_has_a_field_of_its_own_whole_and_streamed() -> None:
    async with running_mesh(answering("<think>\nwhy</think>\n\nso<｜end▁of▁sentence｜>")) as mesh:
        whole = await client(mesh).chat.completions.create(model="oracle", messages=HELLO)
        message = whole.choices[0].message
        assert (message.content, message.model_dump()["reasoning_content"]) == ("so", "why")
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == 6
        stream = await client(mesh).chat.completions.create(model="oracle", messages=HELLO, stream=True)
        deltas = [chunk.choices[0].delta.model_dump() async for chunk in stream]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "why"
        assert "".join(delta.get("content") or "" for delta in deltas) == "so"


async def test_the_template_can_be_told_to_open_the_reasoning() -> None:
    async with running_mesh(answering("why</think>so<｜end▁of▁sentence｜>")) as mesh:
        answer = await client(mesh).chat.completions.create(
            model="oracle", messages=HELLO, extra_body={"chat_template_kwargs": {"thinking": True}}
        )
        message = answer.choices[0].message
        assert (message.content, message.model_dump()["reasoning_content"]) == ("so", "why")


async def test_log_probabilities_of_a_chat_name_tokens_and_alternatives() -> None:
    async with running_mesh(answering("ab")) as mesh:
        answer = await client(mesh).chat.completions.create(
            model="oracle", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content
        assert content is not None
        assert [(entry.token, entry.bytes, entry.logprob) for entry in content] == [
            ("a", [97], -0.5),
            ("b", [98], -0.5),
        ]
        assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a", -0.5), ("b", -1.5)]


async def test_log_probabilities_of_a_completion_have_offsets_across_chunks() -> None:
    async with running_mesh(answering("abc")) as mesh:
        stream = await client(mesh).completions.create(
            model="oracle", prompt="x", max_tokens=3, logprobs=1, stream=True
        )
        reports = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
        assert [token for report in reports for token in report.tokens or []] == ["a", "b", "c"]
        assert [offset for report in reports for offset in report.text_offset or []] == [0, 1, 2]
        assert reports[0].top_logprobs == [{"a": -0.5}]


@pytest.mark.parametrize("prompt", ["hi", ["hi"], spelled("hi"), [spelled("hi")]])
async def test_a_completion_takes_a_string_or_token_ids(prompt: Any) -> None:
    async with running_mesh(answering("there")) as mesh:
        answer = await client(mesh).completions.create(model="oracle", prompt=prompt, max_tokens=5)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("there", "length")
        assert list(mesh.worker.submissions[0].token_ids)[-2:] == spelled("hi")


async def test_token_ids_come_back_even_without_a_tokenizer() -> None:
    async with running_mesh(texts={}) as mesh:
        answer = await mesh.http.post(
            COMPLETIONS, json={"prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True, "logprobs": 1}
        )
        (choice,) = answer.json()["choices"]
        assert choice["token_ids"] == oracle_tokens([5, 6, 7], 4)
        assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"


async def test_every_option_reaches_the_worker() -> None:
    async with running_mesh() as mesh:
        options: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "seed": -1,
            "ignore_eos": True,
            "max_tokens": 3,
        }
        options |= {"min_p": 0.125, "presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
        options |= {"logit_bias": {"7": -100, "8": 2.5}, "drafts": "relaxed"}
        for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hi"})):
            await mesh.http.post(path, json={**prompt, **options, "stop": "zzz", "stop_token_ids": [9]})
            submission = mesh.worker.submissions[-1]
            sampling = submission.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
            assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 0.5)
            assert (dict(sampling.logit_bias), sampling.drafts) == ({7: -100.0, 8: 2.5}, common_pb2.DRAFT_USE_RELAXED)
            assert (sampling.seed, submission.stop.ignore_eos) == (2**64 - 1, True)
            assert (submission.stop.max_tokens, list(submission.stop.token_ids)) == (3, [9])


@pytest.mark.parametrize("relaxed", [True, False])
async def test_an_answer_says_if_its_seed_is_best_effort(relaxed: bool) -> None:
    async with running_mesh(FakeDecodeWorker(relaxed=relaxed)) as mesh:
        for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hi"})):
            answer = await mesh.http.post(path, json={**prompt, "max_tokens": 4})
            assert answer.json()["choices"][0].get("relaxed", False) is relaxed
        last = await collect(mesh, ids_request())
        assert last.finished.relaxed is relaxed


async def test_the_defaults_are_openais() -> None:
    async with running_mesh(FakeDecodeWorker(context_tokens=100)) as mesh:
        await mesh.http.post(CHAT, json={"messages": HELLO, "top_k": -1})
        await mesh.http.post(COMPLETIONS, json={"prompt": "hi"})
        chat, completion = mesh.worker.submissions
        assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.top_k) == (1.0, 1.0, 0)
        assert chat.stop.max_tokens == 100 - len(chat.token_ids)
        assert completion.stop.max_tokens == 16


async def test_max_completion_tokens_goes_before_max_tokens() -> None:
    async with running_mesh() as mesh:
        await mesh.http.post(CHAT, json={"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 2})
        assert mesh.worker.submissions[0].stop.max_tokens == 2


async def test_contents_in_parts_and_developers_are_taken() -> None:
    async with running_mesh() as mesh:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": "ann"}]
        answer = await mesh.http.post(CHAT, json={"messages": messages, "max_tokens": 1, "user": "u", "metadata": {}})
        assert answer.status_code == 200
        assert list(mesh.worker.submissions[0].token_ids)[:5] == spelled("<｜begin▁of▁sentence｜>s<｜User｜>ab")


@pytest.mark.parametrize("field", [{"refusal": "no"}, {"reasoning_content": "why"}], ids=["refusal", "reasoning"])
async def test_an_assistants_turn_may_lack_content(field: dict[str, str]) -> None:
    async with running_mesh() as mesh:
        messages = [*HELLO, {"role": "assistant", "content": None, **field}, *HELLO]
        answer = await mesh.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text


async def test_a_stop_string_ends_the_answer() -> None:
    async with running_mesh(answering("one STOP two", step_seconds=0.005)) as mesh:
        answer = await client(mesh).chat.completions.create(model="oracle", messages=HELLO, stop=["STOP", "x"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")


async def test_the_request_id_is_the_clients_or_a_new_one() -> None:
    async with running_mesh() as mesh:
        body = {"messages": HELLO, "max_tokens": 1}
        mine = await mesh.http.post(CHAT, json={**body, "stream": True}, headers={"x-request-id": "mine-2"})
        assert mine.headers["x-request-id"] == mesh.worker.submissions[0].request_id == "mine-2"
        for bad in ("x" * 200, "tab\tbed"):
            other = await mesh.http.post(CHAT, json=body, headers={"x-request-id": bad})
            assert other.headers["x-request-id"] not in ("", bad)


async def test_events_escape_what_clients_take_for_line_ends() -> None:
    text = "a\u2028b\u0085c\u2029d"
    async with running_mesh(answering(f"{text}<｜end▁of▁sentence｜>")) as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == text


async def test_models_and_health_answer() -> None:
    async with running_mesh() as mesh:
        (model,) = (await client(mesh).models.list()).data
        assert (model.id, model.object) == ("oracle", "model")
        assert (await mesh.http.get("/health")).status_code == 200
        mesh.scheduler.draining.add("decode-0")
        mesh.scheduler.add(mesh.worker.identity())
        await eventually(lambda: not mesh.gateway.available)
        assert (await mesh.http.get("/health")).status_code == 503


async def test_the_port_of_clients_serves_no_metrics() -> None:
    keys = (ApiKeyConfig.model_validate({"name": "alice", "key": "alice-secret"}),)
    async with running_mesh(api_keys=keys) as mesh:
        for headers in ({}, {"authorization": "Bearer alice-secret"}):
            assert (await mesh.http.get("/metrics", headers=headers)).status_code == 404


async def test_many_clients_at_once_get_their_own_answers() -> None:
    async with running_mesh() as mesh:

        async def ask(number: int) -> bool:
            body = {"prompt": [number + 1], "max_tokens": 20, "return_token_ids": True}
            answer: httpx.Response = await mesh.http.post(COMPLETIONS, json=body)
            return bool(answer.json()["choices"][0]["token_ids"] == oracle_tokens([number + 1], 20))

        assert all(await asyncio.gather(*map(ask, range(50))))

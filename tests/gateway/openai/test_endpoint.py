"""The OpenAI API over real HTTP, with the `openai` package and plain requests, before fake workers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import openai
import psutil
import pytest
from deepmesh.v1 import common_pb2
from pydantic import SecretStr

from gateway.config import ApiKeyConfig, HttpConfig, LimitsConfig
from gateway.openai.errors import error_headers, http_status
from mesh.errors import EngineFailed, NoWorker, Overloaded
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens
from tests.support.gateways import Mesh, collect, direct, dispatch, ids_request, running_mesh
from tests.support.oracle_texts import answering, spelled
from tests.support.waiting import PATIENCE_SECONDS, eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hello"}]


def client(mesh: Mesh, key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{mesh.http_port}/v1",
        api_key=key,
        max_retries=0,
        timeout=20,
        http_client=cast(Any, mesh.http),
    )


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


async def test_token_ids_come_back_where_asked_for_even_without_a_tokenizer() -> None:
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


BAD_BODIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "no prompt": (COMPLETIONS, {}, "prompt"),
    "no messages": (CHAT, {}, "messages"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "empty prompt": (COMPLETIONS, {"prompt": ""}, "prompt"),
    "no token ids": (COMPLETIONS, {"prompt": []}, "prompt"),
    "too many prompts": (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n"),
    "ids and text": (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    "id out of range": (COMPLETIONS, {"prompt": [1, 1000]}, "prompt"),
    "negative id": (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    "unknown role": (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    "content of another kind": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    "content of the wrong type": (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "prompt of the wrong type": (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    "temperature of the wrong type": (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature"),
    "negative temperature": (CHAT, {"messages": HELLO, "temperature": -1}, "temperature"),
    "top_p of zero": (CHAT, {"messages": HELLO, "top_p": 0}, "top_p"),
    "top_p over one": (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, "top_p"),
    "bad top_k": (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
    "max_tokens of zero": (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    "negative max_tokens": (CHAT, {"messages": HELLO, "max_tokens": -5}, "max_tokens"),
    "over the context": (CHAT, {"messages": HELLO, "max_tokens": 99999}, "max_tokens"),
    "top_logprobs alone": (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
    "too many logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "top_logprobs"),
    "empty stop": (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    "too many stops": (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop"),
    "unknown template option": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    "tools of a completion": (COMPLETIONS, {"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
    "no choices": (CHAT, {"messages": HELLO, "n": 0}, "n"),
    "best of several": (CHAT, {"messages": HELLO, "best_of": 2}, "best_of"),
    "empty cache salt": (CHAT, {"messages": HELLO, "cache_salt": ""}, "cache_salt"),
    "prompt cut to nothing": (CHAT, {"messages": HELLO, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "effort unknown": (CHAT, {"messages": HELLO, "reasoning_effort": "heroic"}, "reasoning_effort"),
    "thinking and not": (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
    ),
    "presence penalty out of range": (CHAT, {"messages": HELLO, "presence_penalty": 2.5}, "presence_penalty"),
    "no repetition penalty": (CHAT, {"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty"),
    "min_p out of range": (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p"),
    "bias out of range": (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, "logit_bias"),
    "bias of no token": (CHAT, {"messages": HELLO, "logit_bias": {"hello": 1}}, None),
    "bias of an unknown token": (CHAT, {"messages": HELLO, "logit_bias": {"999999": 1}}, "logit_bias"),
    "echo of a chat": (CHAT, {"messages": HELLO, "echo": True}, "echo"),
    "tool calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
}


async def test_bad_bodies_are_refused_by_field_and_never_reach_the_mesh() -> None:
    async with running_mesh() as mesh:
        for name, (path, body, param) in BAD_BODIES.items():
            answer = await mesh.http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), name
            assert error["message"], name
            assert param in (None, error["param"]), (name, error)
        assert mesh.scheduler.queries == []


MALFORMED = {
    "no json": b"{",
    "empty": b"",
    "no object": b"[1]",
    "invalid utf-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "infinite": b'{"prompt": "a", "temperature": 1e999}',
    "deep": b'{"prompt": ' + b"[" * 100_000,
    "nested": b'{"prompt": "a", "stop": ' + b"[" * 1100 + b"]" * 1100 + b"}",
    "long top_k": b'{"prompt": "a", "top_k": ' + b"9" * 400 + b"}",
    "long logprobs": b'{"prompt": "a", "logprobs": ' + b"9" * 400 + b"}",
    "long token": b'{"prompt": [' + b"9" * 5000 + b"]}",
    "long max_tokens": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "long temperature": b'{"prompt": "a", "temperature": ' + b"9" * 5000 + b"}",
}


async def test_malformed_bodies_are_refused() -> None:
    async with running_mesh() as mesh:
        for name, body in MALFORMED.items():
            answer = await mesh.http.post(COMPLETIONS, content=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), name


async def test_an_ignored_field_may_not_be_nested_without_end() -> None:
    body = b'{"prompt": "a", "mood": ' + b"[" * 1100 + b"]" * 1100 + b"}"
    async with running_mesh(http=HttpConfig(unknown_fields="ignore")) as mesh:
        answer = await mesh.http.post(COMPLETIONS, content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_characters_that_clients_take_for_line_ends_are_escaped_in_events() -> None:
    text = "a\u2028b\u0085c\u2029d"
    async with running_mesh(answering(f"{text}<｜end▁of▁sentence｜>")) as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, "stream": True})
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == text


async def test_harmless_values_of_unsupported_options_are_taken() -> None:
    async with running_mesh() as mesh:
        body = {"messages": HELLO, "max_tokens": 1, "n": 1, "tools": [], "best_of": 1, "echo": False}
        answer = await mesh.http.post(CHAT, json={**body, "response_format": {"type": "text"}})
        assert answer.status_code == 200


async def test_an_unknown_field_is_refused_by_its_name() -> None:
    async with running_mesh() as mesh:
        for field in ("max_tokenz", "made_up"):
            with pytest.raises(openai.BadRequestError, match=field) as caught:
                await client(mesh).chat.completions.create(model="oracle", messages=HELLO, extra_body={field: 5})
            assert (caught.value.code, caught.value.param) == ("unknown_parameter", field)
        assert mesh.scheduler.queries == []


async def test_features_that_we_lack_are_refused_by_their_name() -> None:
    async with running_mesh() as mesh:
        for field, value in {"suffix": "b", "web_search_options": {}}.items():
            with pytest.raises(openai.BadRequestError, match=field) as caught:
                await client(mesh).chat.completions.create(model="oracle", messages=HELLO, extra_body={field: value})
            assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


async def test_unknown_fields_may_be_ignored_and_are_then_named_in_a_header() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}, {**HELLO[0], "röle\r\nx": 1}]
    async with running_mesh(http=HttpConfig(unknown_fields="ignore")) as mesh:
        for stream in (False, True):
            body = {"messages": messages, "max_tokens": 1, "logit_bias": {"5": 1}, "max_tokenz": 5, "stream": stream}
            answer = await mesh.http.post(CHAT, json=body)
            named = answer.headers["x-deepmesh-ignored-fields"]
            assert sorted(named.split(", ")) == ["max_tokenz", "messages[0].content[0].mood", "messages[1].r?le??x"]
            assert answer.status_code == 200
        assert "x-deepmesh-ignored-fields" not in (await mesh.http.post(CHAT, json={"messages": HELLO})).headers
        many = {f"field{number}": 1 for number in range(100)}
        assert (await mesh.http.post(CHAT, json={"messages": HELLO, **many})).json()["error"][
            "code"
        ] == "unknown_parameter"
        # A name that reads as if the field were elsewhere.
        for name in ("x` - at `$.messages[9]", "x` - at `$.mood", "x` - at `$"):
            answer = await mesh.http.post(CHAT, json={"messages": HELLO, name: 1})
            assert answer.json()["error"]["code"] == "unknown_parameter"


async def test_error_codes_are_spelled_as_openai_spells_them() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "missing_required_parameter": {},
        "invalid_type": {"messages": HELLO, "temperature": "hot"},
        "invalid_value": {"messages": HELLO, "temperature": -1},
        "context_length_exceeded": {"messages": HELLO, "max_tokens": 99999},
    }
    async with running_mesh() as mesh:
        for code, body in bodies.items():
            assert (await mesh.http.post(CHAT, json=body)).json()["error"]["code"] == code


async def test_an_unknown_model_is_not_found() -> None:
    async with running_mesh() as mesh:
        with pytest.raises(openai.NotFoundError) as caught:
            await client(mesh).chat.completions.create(model="gpt-7", messages=HELLO)
        assert caught.value.code == "model_not_found"


async def test_unknown_paths_and_methods_have_errors_in_the_same_form() -> None:
    async with running_mesh() as mesh:
        for path, status, code in (("/v2", 404, "unknown_url"), (CHAT, 405, "method_not_supported")):
            answer = await mesh.http.get(path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        # Clients that try a route of OpenAI's take 404 for "not here", and 405 for a mistake of theirs.
        assert (await mesh.http.post("/v1/responses/compact", json={})).status_code == 404


async def test_errors_repeat_no_more_of_a_request_than_fits_in_a_line() -> None:
    long = "x" * 100_000
    bodies: list[dict[str, Any]] = [{"model": long}, {long: 1}, {"tool_choice": long}, {"messages": [{"role": long}]}]
    async with running_mesh() as mesh:
        for body in bodies:
            answer = await mesh.http.post(CHAT, json={"messages": HELLO, **body})
            assert answer.status_code in (400, 404)
            assert len(answer.content) < 2000
        assert len((await mesh.http.post("/v1/messages", json={"model": long})).content) < 2000


@pytest.mark.parametrize("declared", [True, False], ids=["with a length", "in chunks"])
async def test_a_body_of_50_mb_is_refused_without_being_kept(declared: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 1_000_000

    async with running_mesh(http=HttpConfig(body_bytes=100_000_000 // 8)) as mesh:
        headers = {"content-length": "50000000"} if declared else {}
        answer = await mesh.http.post(CHAT, content=chunks(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_refusals_that_pass_say_when_to_come_back() -> None:
    async with running_mesh(dispatch=dispatch(worker_seconds=0)) as mesh:
        mesh.scheduler.refusals = [Overloaded("full", retry_after_ms=2500), NoWorker("none")]
        full, none = [await mesh.http.post(CHAT, json={"messages": HELLO}) for _ in range(2)]
        assert (full.status_code, full.headers["retry-after"]) == (429, "3")
        assert (none.status_code, none.headers["retry-after"]) == (503, "1")


def test_every_error_has_a_status_and_only_passing_ones_a_delay() -> None:
    assert (http_status(EngineFailed("x")), error_headers(EngineFailed("x"))) == (503, {"retry-after": "1"})


async def test_a_failure_in_the_middle_is_the_last_event() -> None:
    class FailsLate(FakeDecodeWorker):
        def generate(self, request: Any) -> None:
            if request.generated == 5:
                request.failure = Overloaded("out of blocks")
            else:
                super().generate(request)

    async with running_mesh(FailsLate(step_seconds=0.005)) as mesh:
        with pytest.raises(openai.APIError, match="out of blocks"):
            stream = await client(mesh).chat.completions.create(model="oracle", messages=HELLO, stream=True)
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_stops_the_work(stream: bool) -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        body = json.dumps({"messages": HELLO, "stream": stream, "max_tokens": 3000}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await eventually(lambda: mesh.worker.live_requests == 1)
        writer.close()
        await eventually(lambda: len(mesh.worker.cancelled) == 1)


async def test_a_client_that_disconnects_while_sending_its_body_leaves_nothing() -> None:
    async with running_mesh() as mesh:
        _, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        assert (await mesh.http.get("/health")).status_code == 200
        assert mesh.scheduler.queries == []


@direct
async def test_a_client_that_never_reads_is_cut_off_and_its_connection_closed() -> None:
    worker = FakeDecodeWorker(context_tokens=500_000, tokens_per_step=50)
    limits = LimitsConfig(unread_tokens=2000, stalled_seconds=1.0)
    async with running_mesh(worker, limits=limits) as mesh:
        body = json.dumps({"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port, limit=1024)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await eventually(lambda: len(worker.cancelled) == 1)
        await mesh.drained()
        ends = mesh.http_port, writer.get_extra_info("sockname")[1]
        await eventually(lambda: ends not in established())
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        writer.close()


def established() -> set[tuple[int, int]]:
    """The ports of this process's connections, its own first."""
    connections = psutil.Process().net_connections("tcp")
    return {(each.laddr.port, each.raddr.port) for each in connections if each.status == psutil.CONN_ESTABLISHED}


async def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    async with running_mesh(http=HttpConfig(body_seconds=0.1)) as mesh:
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
        assert b"504" in await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        writer.close()


async def test_a_request_over_its_deadline_times_out() -> None:
    limits = LimitsConfig(generation_seconds=0.2)
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01), limits=limits) as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, "max_tokens": 4000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_keys_are_required_where_there_are_any() -> None:
    async with running_mesh(
        api_keys=(ApiKeyConfig(name="alice", key=SecretStr("alice-secret"), max_concurrent=1),)
    ) as mesh:
        with pytest.raises(openai.AuthenticationError):
            await client(mesh, "wrong-secret").models.list()
        assert (await mesh.http.post(CHAT, json={"messages": HELLO})).status_code == 401
        alice = client(mesh, "alice-secret")
        answer = await alice.chat.completions.create(model="oracle", messages=HELLO, max_tokens=1)
        assert answer.usage is not None
        mesh.worker.step_seconds = 0.01
        stream = await alice.chat.completions.create(model="oracle", messages=HELLO, stream=True)
        with pytest.raises(openai.RateLimitError):
            await alice.chat.completions.create(model="oracle", messages=HELLO)
        await stream.close()


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

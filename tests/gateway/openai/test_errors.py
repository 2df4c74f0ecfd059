"""What the OpenAI API refuses, and how its errors read."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from gateway.config import ApiKeyConfig, HttpConfig, LimitsConfig
from gateway.json_cost import MAX_MILLISECONDS, decoding_ms
from gateway.openai import parsing
from gateway.openai.errors import error_headers, http_status
from gateway.openai.parsing import READINGS_A_FIELD, parse
from gateway.openai.requests import MAX_CHOICES, CompletionBody
from gateway.requests import MAX_MESSAGES
from gateway.tools import MAX_TOOLS
from mesh.errors import EngineFailed, InvalidRequest, NoWorker, Overloaded, UnknownField
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import dispatch, running_mesh
from tests.support.openai_calls import CHAT, COMPLETIONS, HELLO, client

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
TOOL = {"type": "function", "function": {"name": "f"}}

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
    "content of another kind": (
        CHAT,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].type",
    ),
    "no content": (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    "content of null": (CHAT, {"messages": [*HELLO, {"role": "tool", "content": None}]}, "messages[1].content"),
    "an assistant that says nothing": (CHAT, {"messages": [{"role": "assistant"}, *HELLO]}, "messages[0].content"),
    "no part of content": (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "a part without text": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
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
    "too many logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
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
    # None of them is read before they are counted: the field would be another.
    "too many messages": (CHAT, {"messages": [{"role": "user", "audio": 1}] * (MAX_MESSAGES + 1)}, "messages"),
    "too many calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * MAX_MESSAGES}]}, "messages"),
    "too many tools": (CHAT, {"messages": HELLO, "tools": [TOOL] * (MAX_TOOLS + 1)}, "tools"),
    "too many messages to tokenize": ("/tokenize", {"messages": HELLO * (MAX_MESSAGES + 1)}, "messages"),
    "too many token ids": (COMPLETIONS, {"prompt": [1] * 1_000_001}, "prompt"),
    "too many tokens to spell": ("/detokenize", {"tokens": [1] * (FakeDecodeWorker.context_tokens + 1)}, "tokens"),
    "tool calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
}


async def test_bad_bodies_are_refused_by_field() -> None:
    async with running_mesh() as mesh:
        for name, (path, body, param) in BAD_BODIES.items():
            answer = await mesh.http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), name
            assert error["message"], name
            assert param in (None, error["param"]), (name, error)
        assert mesh.scheduler.queries == []


async def test_token_ids_are_counted_before_they_are_looked_at() -> None:
    async with running_mesh(limits=LimitsConfig(prompt_characters=3)) as mesh:
        error = (await mesh.http.post(COMPLETIONS, json={"prompt": [-1] * 4})).json()["error"]
        assert (error["message"], error["param"]) == ("the prompt has 4 token ids, the limit is 3", "prompt")


def test_prompts_are_counted_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionBody, "_ask", lambda *_: pytest.fail("a prompt was read"))
    for prompt in ("[[1]" + ",[1]" * MAX_CHOICES + "]", '[""' + ',""' * MAX_CHOICES + "]"):
        with pytest.raises(InvalidRequest, match=f"{MAX_CHOICES + 1} answers"):
            parse(CompletionBody, b'{"prompt": %s}' % prompt.encode()).body.asks("a")


def test_a_huge_name_is_compared_with_no_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "get_close_matches", lambda *_: pytest.fail("names were compared"))
    with pytest.raises(UnknownField, match="leave it out"):
        parse(CompletionBody, b'{"prompt": "a", "%s": 1}' % (b"max_tokens" * 1000))


def test_many_ignored_fields_do_not_read_the_body_again() -> None:
    text = b'"%s"' % (b"a" * 1_500_000)
    assert (
        (1 + 5 * READINGS_A_FIELD) * decoding_ms(text)
        < MAX_MILLISECONDS
        < (1 + 6 * READINGS_A_FIELD) * decoding_ms(text)
    )

    def body(fields: int) -> bytes:
        return b'{"prompt": %s%s}' % (text, b"".join(b', "u%d": 1' % number for number in range(fields)))

    assert len(parse(CompletionBody, body(5), ignore_unknown=True).ignored) == 5
    with pytest.raises(UnknownField, match="u5"):
        parse(CompletionBody, body(6), ignore_unknown=True)


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


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "a"}), ("/v1/messages", {}), ("/tokenize", {})])
async def test_a_compressed_body_is_refused_as_such(path: str, body: dict[str, Any]) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    async with running_mesh() as mesh:
        refused = await mesh.http.post(path, content=gzip.compress(json.dumps(body).encode()), headers=headers)
        assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "identity")
        assert "encoded in gzip" in refused.json()["error"]["message"]
        plain = await mesh.http.post(path, json={"prompt": "a"}, headers={"content-encoding": "identity"})
        assert plain.status_code != 415


async def test_an_ignored_field_may_not_be_nested_without_end() -> None:
    body = b'{"prompt": "a", "mood": ' + b"[" * 1100 + b"]" * 1100 + b"}"
    async with running_mesh(http=HttpConfig(unknown_fields="ignore")) as mesh:
        answer = await mesh.http.post(COMPLETIONS, content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


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


async def test_ignored_fields_are_named_in_a_header() -> None:
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


async def test_errors_repeat_little_of_a_request() -> None:
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


def test_errors_have_a_status_and_passing_ones_a_delay() -> None:
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

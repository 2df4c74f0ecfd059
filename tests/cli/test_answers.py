import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cli.answers import Answer, Show, stream_http
from mesh.errors import EndpointUnavailable
from mesh.openai_client import OpenAIClient


@asynccontextmanager
async def http_answer(status: str, body: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request with `body`; its URL, and the requests that it got."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        requests.append(await reader.readexactly(length))
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", requests


async def ask(url: str, answer: Answer, show: Show = lambda text, reasoning: None) -> None:
    async with OpenAIClient(url, None, timeout_s=10.0) as client:
        await stream_http(client, {"model": "m"}, answer, show)


def events(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


async def test_an_http_answer_streams_its_text_reasoning_and_usage() -> None:
    shown: list[tuple[str, bool]] = []
    body = events(
        delta(role="assistant"), delta(reasoning_content="hm"), delta(content="Hi"), {"choices": [], "usage": USAGE}
    )
    answer = Answer()
    async with http_answer("200 OK", body) as (url, requests):
        await ask(url, answer, lambda text, reasoning: shown.append((text, reasoning)))
    assert [each for each in shown if each[0]] == [("hm", True), ("Hi", False)]
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == ("Hi", 9, 4, 2)
    asked = json.loads(requests[0])
    assert (asked["model"], asked["stream"], asked["stream_options"]) == ("m", True, {"include_usage": True})


async def test_an_http_refusal_shows_status_and_reason() -> None:
    async with http_answer("429 Too Many Requests", '{"error": {"message": "full"}}') as (url, _):
        with pytest.raises(EndpointUnavailable, match=r"answered 429: .*full"):
            await ask(url, Answer())


async def test_an_error_inside_the_stream_is_raised() -> None:
    body = events(delta(content="Hi"), {"error": {"message": "the worker was lost"}})
    async with http_answer("200 OK", body) as (url, _):
        with pytest.raises(EndpointUnavailable, match="the worker was lost"):
            await ask(url, Answer())


async def test_nobody_listening_is_one_clear_error() -> None:
    with pytest.raises(EndpointUnavailable, match=r"http://127\.0\.0\.1:1/v1/chat/completions does not answer"):
        await ask("http://127.0.0.1:1/v1", Answer())


def test_no_text_has_no_times() -> None:
    answer = Answer()
    answer.start()
    assert (answer.ttft_ms, answer.tpot_ms) == (None, None)


def test_times_are_per_token_after_the_first() -> None:
    answer = Answer()
    answer.start()
    for _ in range(3):
        answer.note_text()
    answer.completion_tokens = 3
    assert answer.ttft_ms is not None and answer.tpot_ms is not None
    assert 0 <= answer.ttft_ms < 1000 and 0 <= answer.tpot_ms < 1000

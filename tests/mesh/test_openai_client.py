from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import AnswerBroken, AnswerIncomplete, EndpointRefused
from mesh.openai_client import OpenAIClient

BODY = b': a comment\n\ndata: {"choices": [{"text": "a"}]}\r\n\r\nevent: x\ndata:{"usage": {}}\n\ndata: [DONE]\n\n'


class Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def answering(*pieces: bytes, status: int = 200, headers: dict[str, str] | None = None) -> OpenAIClient:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, stream=Pieces(pieces))

    return OpenAIClient("http://endpoint/v1", None, timeout_s=5.0, transport=httpx.MockTransport(answer))


async def streamed(client: OpenAIClient) -> list[str]:
    async with client:
        chunks = [chunk async for chunk in client.stream("completions", {"prompt": "p"})]
    return ["usage" if chunk.usage else chunk.choices[0].content for chunk in chunks]


@given(cuts=st.lists(st.integers(0, len(BODY))))
async def test_events_are_the_same_however_the_body_is_cut(cuts: list[int]) -> None:
    bounds = sorted({0, len(BODY), *cuts})
    assert await streamed(answering(*(BODY[start:end] for start, end in pairwise(bounds)))) == ["a", "usage"]


async def test_an_unfinished_event_is_not_read() -> None:
    with pytest.raises(AnswerIncomplete, match="before \\[DONE\\]"):
        await streamed(answering(b'data: {"choices": []}'))


@pytest.mark.parametrize("event", [b"data: {\n", b'data: {"error": {"message": "lost"}}\n', b"data: [1]\n"])
async def test_a_malformed_event_and_an_error_event_break_the_answer(event: bytes) -> None:
    with pytest.raises(AnswerBroken, match=r"malformed|broke off: lost"):
        await streamed(answering(event, b"data: [DONE]\n"))


async def test_a_refusal_has_its_status_and_its_delay() -> None:
    client = answering(b'{"error": {"message": "full"}}', status=429, headers={"retry-after": "3"})
    with pytest.raises(EndpointRefused, match="answered 429: full") as caught:
        await streamed(client)
    assert (caught.value.status, caught.value.retry_after_ms) == (429, 3000)


@pytest.mark.parametrize(("url", "advised"), [("http://endpoint", True), ("http://endpoint/v1", False)])
async def test_a_url_that_lacks_the_version_is_told_so(url: str, advised: bool) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(404, json={"error": {"message": "not found"}}))
    async with OpenAIClient(url, None, timeout_s=5.0, transport=transport) as client:
        with pytest.raises(EndpointRefused, match="answered 404: not found") as caught:
            await client.find_model(None)
    assert ("ends in /v1" in caught.value.message) == advised

"""LiteLLM as a client of each of the APIs: `make check-litellm`."""

from typing import Any

import pytest

litellm: Any = pytest.importorskip("litellm", reason="part of the extra 'conformance'")

pytestmark = pytest.mark.check("litellm")
MESSAGES = [{"role": "user", "content": "Write one short sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
    },
}
ASKED: dict[str, Any] = {"messages": MESSAGES, "api_key": "unused", "max_tokens": 64, "temperature": 0.0}


@pytest.fixture(params=["openai", "anthropic"])
def served(request: pytest.FixtureRequest, mesh_url: str) -> dict[str, Any]:
    base = mesh_url if request.param == "anthropic" else f"{mesh_url}/v1"
    return {"model": f"{request.param}/tiny-r1", "api_base": base, **ASKED}


def test_a_chat_is_answered(served: dict[str, Any]) -> None:
    answer = litellm.completion(**served)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def test_a_chat_streams_what_it_answers(served: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**served, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(served: dict[str, Any], stream: bool) -> None:
    asked = {**served, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
    answer = litellm.completion(**asked)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=MESSAGES)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert isinstance(litellm.utils.json.loads(call.function.arguments)["days"], int)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_answered(mesh_url: str, stream: bool) -> None:
    asked = {"input": "Write one short sentence.", "max_output_tokens": 64, "stream": stream}
    answer = litellm.responses(model="openai/tiny-r1", api_base=f"{mesh_url}/v1", api_key="unused", **asked)
    if stream:
        answer = list(answer)[-1].response
    assert answer.output
    assert answer.usage.output_tokens > 0


async def test_embeddings_are_refused_as_an_unknown_route(mesh_url: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        await litellm.aembedding("openai/tiny-r1", input=["a"], api_base=f"{mesh_url}/v1", api_key="unused")

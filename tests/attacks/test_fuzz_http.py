"""Bodies and headers that no client means: each is answered, wrong ones with a client error, and nothing is logged."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gateways import running_mesh
from tests.support.waiting import PATIENCE_SECONDS

CHAT, COMPLETIONS, STREAMS = "/v1/chat/completions", "/v1/completions", "/v1/streams/"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALLED = {"city": ["Oslo"], "days": 2}
VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "oracle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 1.0}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2, "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True, "stop": ["a"]}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 1, "seed": 3, "logit_bias": {"5": 1.0}}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": json.dumps(CALLED)},
                {"type": "function_call_output", "call_id": "a", "output": "rain"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 2,
        },
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": CALLED}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "rain"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 2,
            "stream": True,
        },
    ),
]
TEXT = st.text(max_size=8)
# A call takes longer than what most properties look at: 33 of each in `make test`, 1,666 in `make soak`.
CALLS = settings(max_examples=settings().max_examples // 3)
SCALARS = (
    st.none()
    | st.booleans()
    | TEXT
    | st.integers()
    | st.floats()
    | st.sampled_from([2**31, 2**63, 2**64, -1, 0, 1e308])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@st.composite
def changed_bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A valid body, with one or two of its parts, at any depth, replaced, removed or added."""
    path, body = draw(st.sampled_from(VALID))
    body = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(1, 2))):
        place: Any = body
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or draw(st.booleans()):
                break
            place = place[key]
        if not place:
            continue
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "replace":
            place[key] = draw(VALUES)
        elif action == "remove":
            del place[key]
        elif isinstance(place, dict):
            place[draw(TEXT)] = draw(VALUES)
    return path, body


def check(response: httpx.Response) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


def fuzz_bodies(client: httpx.Client) -> None:
    @CALLS
    @given(changed_bodies())
    def parts(asked: tuple[str, Any]) -> None:
        path, body = asked
        # As clients do write them: NaN and Infinity too.
        check(client.post(path, content=json.dumps(body).encode()))

    @CALLS
    @given(
        st.sampled_from([CHAT, COMPLETIONS, RESPONSES, MESSAGES]),
        st.binary(max_size=60) | st.text(max_size=60).map(str.encode),
    )
    def raw(path: str, content: bytes) -> None:
        check(client.post(path, content=content))

    parts()
    raw()


def fuzz_positions(client: httpx.Client) -> None:
    with client.stream("POST", COMPLETIONS, json={"prompt": "hi", "max_tokens": 2, "stream": True}) as begun:
        begun.read()
    right = begun.headers["x-deepmesh-stream"]
    characters = st.characters(min_codepoint=32, max_codepoint=126)
    tokens = (
        st.just(right)
        | st.text("abcXYZ019-_", min_size=1)
        | st.integers(0, len(right) - 1).map(
            lambda place: right[:place] + ("A" if right[place] != "A" else "B") + right[place + 1 :]
        )
    )

    @CALLS
    @given(tokens, st.text(characters, max_size=30).map(str.strip) | st.integers().map(str))
    def resume(token: str, position: str) -> None:
        check(client.get(STREAMS + token, headers={"last-event-id": position}))

    resume()


@pytest.mark.hypothesis
@pytest.mark.parametrize("fuzz", [fuzz_bodies, fuzz_positions])
async def test_whatever_comes_is_answered_and_logged_by_no_traceback(
    fuzz: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_mesh() as mesh:
        with httpx.Client(base_url=str(mesh.http.base_url), timeout=PATIENCE_SECONDS, trust_env=False) as client:
            await asyncio.to_thread(fuzz, client)
            path, body = VALID[0]
            assert (await mesh.http.post(path, json=body)).status_code == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]

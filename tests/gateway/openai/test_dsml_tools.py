"""DeepSeek-V3.2 over HTTP: what the model reads of tools, schemas and its own calls, and what clients get."""

from typing import Any

import pytest

from gateway.catalog import ModelText
from gateway.tool_formats.dsml import V32
from gateway.tool_formats.dsml_reader import DSML
from gateway.tools import ToolCall
from tests.support.deepseek_v32 import chat_template, tokenizer
from tests.support.fake_decode import FakeDecodeWorker, scripted
from tests.support.gateways import MODEL, Mesh, running_mesh
from tests.support.openai_calls import CHAT, HELLO

TEXTS = {MODEL: ModelText(tokenizer(), chat_template())}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALLS = [ToolCall("", "weather", '{"city": "Bergen", "days": 3}'), ToolCall("", "weather", "{}")]
END = "<｜end▁of▁sentence｜>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def answering(text: str) -> FakeDecodeWorker:
    return FakeDecodeWorker(next_token=scripted(tokenizer().encode(text)), eos_token_id=1)


def prompt_of(mesh: Mesh) -> str:
    return tokenizer().spell(list(mesh.worker.submissions[-1].token_ids))


@pytest.mark.parametrize("thinking", [True, False])
async def test_the_next_prompt_continues_an_answer_with_calls(thinking: bool) -> None:
    thought, said = ("which?</think>" if thinking else ""), "One moment."
    text = thought + said + V32.calls(CALLS) + END
    async with running_mesh(answering(text), texts=TEXTS) as mesh:
        body: Any = {"messages": HELLO, "tools": [WEATHER], "chat_template_kwargs": {"thinking": thinking}}
        (choice,) = (await mesh.http.post(CHAT, json=body)).json()["choices"]
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == (said, "tool_calls")
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == [
            (call.name, call.arguments) for call in CALLS
        ]
        results = [{"role": "tool", "content": "rain", "tool_call_id": call["id"]} for call in message["tool_calls"]]
        first = prompt_of(mesh)
        await mesh.http.post(CHAT, json={**body, "messages": [*HELLO, message, *results]})
        assert prompt_of(mesh) == (
            f"{first}{text}{V32.outputs(['rain', 'rain'])}\n\n{'<think>' if thinking else '</think>'}"
        )


async def test_strict_calls_are_held_to_their_schema() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    async with running_mesh(answering("Hi." + END), texts=TEXTS) as mesh:
        await mesh.http.post(CHAT, json={"messages": HELLO, "tools": [strict]})
        constraint = mesh.worker.submissions[0].constraint
        assert constraint.free_until == tokenizer().control_id(DSML)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_forced_call_goes_on_where_the_prompt_ends(choice: Any) -> None:
    opening = V32.opening("weather")
    async with running_mesh(answering(V32.calls(CALLS[:1]).removeprefix(opening) + END), texts=TEXTS) as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, "tools": [WEATHER], "tool_choice": choice})
        message = answer.json()["choices"][0]["message"]
        assert prompt_of(mesh).endswith(f"</think>{opening}")
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [CALLS[0].arguments]


RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
MESSAGES = {"messages": HELLO, "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**MESSAGES, "response_format": RESPONSE_FORMAT}),
        (
            "/v1/responses",
            {"input": "hello", "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}},
        ),
        ("/v1/messages", {**MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
async def test_every_api_tells_the_model_the_schema(path: str, body: Any) -> None:
    async with running_mesh(answering("{}" + END), texts=TEXTS) as mesh:
        assert (await mesh.http.post(path, json={"model": MODEL, **body})).status_code == 200
        assert 'schema to reply:\n{"type": "object", "properties": {"city"' in prompt_of(mesh)
        if path == "/v1/messages":
            counted = await mesh.http.post(
                f"{path}/count_tokens", json={key: body[key] for key in body if key != "max_tokens"}
            )
            assert counted.json()["input_tokens"] == len(mesh.worker.submissions[0].token_ids)


async def test_json_mode_adds_nothing_to_the_prompt() -> None:
    async with running_mesh(answering("{}" + END), texts=TEXTS) as mesh:
        await mesh.http.post(CHAT, json={**MESSAGES, "response_format": {"type": "json_object"}})
        assert "Response Format" not in prompt_of(mesh)

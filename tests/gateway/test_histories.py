"""Turns with calls and reasoning, as clients of each API send them back, and the prompt that they make."""

from typing import Any

import pytest
from deepmesh.v1 import gateway_pb2

from gateway.catalog import ModelText
from gateway.prompts.chat import ChatTemplate
from gateway.prompts.jinja_template import JinjaTemplate
from tests.support.chat_templates import ARGUMENTS_BY_KEY, CONTENT_IS_TEXT, TOOLS_AS_JSON
from tests.support.gateways import MODEL, Mesh, collect, model_texts, running_mesh
from tests.support.oracle_texts import answering, prompt_of

END = "<｜end▁of▁sentence｜>"
CALL: Any = {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHAT: Any = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "look it up"},
    {"role": "tool", "tool_call_id": "c0", "content": "rain"},
]
ITEMS: Any = [
    {"role": "user", "content": "q"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "look it up"}]},
    {"type": "function_call", "call_id": "c0", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "c0", "output": "rain"},
]
BLOCKS: Any = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "look it up", "signature": ""},
            {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Oslo"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c0", "content": "rain"}]},
]
HISTORIES = {
    "chat": ("/v1/chat/completions", {"messages": CHAT}),
    "chat-empty-text": ("/v1/chat/completions", {"messages": [CHAT[0], {**CHAT[1], "content": ""}, CHAT[2]]}),
    "responses": ("/v1/responses", {"input": ITEMS}),
    "messages": ("/v1/messages", {"messages": BLOCKS, "max_tokens": 8}),
}


def texts(source: str) -> dict[str, ModelText]:
    tokenizer = model_texts()[MODEL].tokenizer
    assert tokenizer is not None
    return {MODEL: ModelText(tokenizer, ChatTemplate(JinjaTemplate(source, tokenizer), tokenizer))}


async def prompt(mesh: Mesh, route: str, body: dict[str, Any]) -> str:
    response = await mesh.http.post(route, json=body)
    assert response.status_code == 200, response.text
    return prompt_of(mesh)


async def test_a_template_that_needs_text_writes_calls_alone() -> None:
    async with running_mesh(answering("wet" + END), texts=texts(CONTENT_IS_TEXT)) as mesh:
        for route, body in HISTORIES.values():
            text = await prompt(mesh, route, body)
            assert '<｜tool▁call▁begin｜>weather```json{"city":' in text
            assert text.endswith("tool:rain")


async def test_reasoning_between_calls_reaches_the_template() -> None:
    async with running_mesh(answering("wet" + END), texts=texts(ARGUMENTS_BY_KEY)) as mesh:
        for route, body in HISTORIES.values():
            assert "<|assistant|><think>look it up</think>" in await prompt(mesh, route, body)
        renamed = [CHAT[0], {**CHAT[1], "reasoning_content": None, "reasoning": "vLLM's name"}, CHAT[2]]
        assert "<think>vLLM's name</think>" in await prompt(mesh, "/v1/chat/completions", {"messages": renamed})


@pytest.mark.parametrize("ignored", [False, True])
async def test_tools_reach_the_template_as_the_client_wrote_them(ignored: bool) -> None:
    function = {"strict": False, "parameters": {"type": "object", "properties": {}}, "name": "clock"}
    tool: Any = {"function": {**function, **({"colour": "red"} if ignored else {})}, "type": "function"}
    http = {"unknown_fields": "ignore" if ignored else "refuse"}
    async with running_mesh(answering("noon" + END), texts=texts(TOOLS_AS_JSON), http=http) as mesh:
        text = await prompt(mesh, "/v1/chat/completions", {"messages": CHAT[:1], "tools": [tool]})
        assert text.startswith(
            '<|tools|>[{"function": {"strict": false, "parameters": {"type": "object", "properties": {}}, '
            '"name": "clock"}, "type": "function"}]'
        )


async def test_a_named_speaker_reaches_the_template() -> None:
    async with running_mesh(answering("hi" + END), texts=texts(TOOLS_AS_JSON)) as mesh:
        messages = [{"role": "user", "name": "Ada", "content": "q"}]
        assert await prompt(mesh, "/v1/chat/completions", {"messages": messages}) == "<|Ada|>q"


async def test_names_and_reasoning_reach_the_template_over_grpc_too() -> None:
    async with running_mesh(answering("wet" + END), texts=texts(ARGUMENTS_BY_KEY)) as mesh:
        said = gateway_pb2.ChatMessage(role="assistant", content="so", reasoning="because")
        chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="q"), said])
        await collect(mesh, gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(chat=chat), max_tokens=8))
        assert "<|assistant|><think>because</think>so" in prompt_of(mesh)
    async with running_mesh(answering("hi" + END), texts=texts(TOOLS_AS_JSON)) as mesh:
        chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", name="Ada", content="q")])
        await collect(mesh, gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(chat=chat), max_tokens=8))
        assert prompt_of(mesh) == "<|Ada|>q"

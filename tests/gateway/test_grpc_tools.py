"""Tools over gRPC."""

import json
from typing import Any

import grpc
import pytest
from deepmesh.v1 import gateway_pb2

from gateway.requests import MAX_MESSAGES
from gateway.tool_formats.deepseek import V31
from gateway.tools import MAX_TOOLS, ToolCall
from tests.support.fake_decode import FakeDecodeWorker, scripted
from tests.support.gateways import collect, running_mesh
from tests.support.oracle_texts import prompt_of, spelled

CALLS = [ToolCall("", "weather", '{"city": "Bergen"}'), ToolCall("", "clock", "{}")]
TOOLS = [
    gateway_pb2.Tool(name="weather", description="The weather of a city", parameters_json='{"type": "object"}'),
    gateway_pb2.Tool(name="clock"),
]
USER = gateway_pb2.ChatMessage(role="user", content="hello")
# One schema like this may be decoded, several may not.
MANY_LISTS = json.dumps({"enum": [[]] * 100_000})
END = "<｜end▁of▁sentence｜>"
# A number from the wire that this version has no name for; stubs are typed to refuse it.
UNKNOWN_MODE: Any = 9


def answering(text: str) -> FakeDecodeWorker:
    return FakeDecodeWorker(next_token=scripted(spelled(text)), eos_token_id=1)


# An answer of it has more than 500 characters, each of which is a token here.
LONG = {"properties": {"a": {"type": "array", "items": {"type": "null"}, "minItems": 100}}, "required": ["a"]}


def request(*messages: gateway_pb2.ChatMessage, **fields: Any) -> gateway_pb2.GenerateRequest:
    chat = gateway_pb2.Chat(**{"messages": messages or (USER,), "tools": TOOLS, **fields})
    return gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(chat=chat), max_tokens=500)


async def test_calls_come_apart_from_the_text() -> None:
    async with running_mesh(answering("One moment." + V31.calls(CALLS) + END)) as mesh:
        answer = await collect(mesh, request())
        assert (answer.text, answer.finished.called_tools) == ("One moment.", True)
        pieces = [piece for delta in answer.deltas for piece in delta.tool_calls]
        assert [(piece.index, piece.name) for piece in pieces if piece.id] == [(0, "weather"), (1, "clock")]
        arguments = ["".join(piece.arguments_json for piece in pieces if piece.index == index) for index in (0, 1)]
        assert arguments == [call.arguments for call in CALLS]
        single = await collect(mesh, request(single_tool_call=True))
        assert {piece.index for delta in single.deltas for piece in delta.tool_calls} == {0}


async def test_a_choice_forces_a_call_or_hides_the_tools() -> None:
    async with running_mesh(answering('{"city": "Oslo"}<｜tool▁call▁end｜>' + END)) as mesh:
        named = gateway_pb2.ToolChoice(name="weather")
        answer = await collect(mesh, request(tool_choice=named))
        assert prompt_of(mesh).endswith(V31.opening("weather"))
        assert answer.deltas[0].tool_calls[0].name == "weather"
        required = gateway_pb2.ToolChoice(mode=gateway_pb2.TOOL_CHOICE_MODE_REQUIRED)
        await collect(mesh, request(tool_choice=required))
        assert prompt_of(mesh).endswith(V31.opening(None))
        none = gateway_pb2.ToolChoice(mode=gateway_pb2.TOOL_CHOICE_MODE_NONE)
        hidden = await collect(mesh, request(tool_choice=none))
        assert "weather" not in prompt_of(mesh)
        assert not hidden.finished.called_tools


async def test_calls_and_results_go_back_to_the_model() -> None:
    made = [gateway_pb2.ToolCall(id=call.name, name=call.name, arguments_json=call.arguments) for call in CALLS]
    turns = [
        USER,
        gateway_pb2.ChatMessage(role="assistant", tool_calls=made),
        gateway_pb2.ChatMessage(role="tool", content="noon", tool_call_id="clock"),
        gateway_pb2.ChatMessage(role="tool", content="rain", tool_call_id="weather"),
    ]
    async with running_mesh(answering("fine" + END)) as mesh:
        await collect(mesh, request(*turns))
        assert V31.calls(CALLS) in prompt_of(mesh)
        assert V31.outputs(["rain", "noon"]) in prompt_of(mesh)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tools": [gateway_pb2.Tool(name="a", parameters_json="[1]")]}, "parameters_json"),
        ({"tools": [gateway_pb2.Tool(name="a", parameters_json="{")]}, "parameters_json"),
        ({"tools": [gateway_pb2.Tool(name="a", parameters_json=MANY_LISTS)] * 4}, "tools has too many lists"),
        ({"tools": [gateway_pb2.Tool(name="a b")]}, "name"),
        (
            {
                "tools": [gateway_pb2.Tool(name="a", parameters_json=json.dumps(LONG))],
                "tool_choice": gateway_pb2.ToolChoice(name="a"),
            },
            "max_tokens leaves",
        ),
        (
            {
                "tools": [gateway_pb2.Tool(name="a", parameters_json='{"type": "strin"}', strict=True)],
                "tool_choice": gateway_pb2.ToolChoice(mode=gateway_pb2.TOOL_CHOICE_MODE_REQUIRED),
            },
            "strin",
        ),
        ({"tools": [gateway_pb2.Tool(name="a", parameters_json="{")] * (MAX_TOOLS + 1)}, "129 tools, the limit is 128"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "16385 messages and calls, the limit is 16384"),
        (
            {"messages": [gateway_pb2.ChatMessage(role="user", tool_calls=[gateway_pb2.ToolCall()] * MAX_MESSAGES)]},
            "16385 messages and calls, the limit is 16384",
        ),
        ({"tools": [], "tool_choice": gateway_pb2.ToolChoice(name="a")}, "tool_choice"),
        ({"tool_choice": gateway_pb2.ToolChoice(name="a")}, "tool_choice"),
        ({"tool_choice": gateway_pb2.ToolChoice(mode=UNKNOWN_MODE)}, "chat.tool_choice.mode is 9"),
    ],
)
async def test_bad_tools_and_too_many_messages_are_refused(fields: dict[str, Any], complaint: str) -> None:
    async with running_mesh() as mesh:
        with pytest.raises(grpc.aio.AioRpcError, match=complaint) as caught:
            await collect(mesh, request(**fields))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

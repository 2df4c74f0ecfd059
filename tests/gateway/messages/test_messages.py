"""Anthropic's Messages API with the `anthropic` package: blocks in, blocks out, whole and streamed."""

from importlib import import_module
from typing import Any, cast

import pytest

from gateway.config import ApiKeyConfig
from gateway.requests import MAX_MESSAGES
from gateway.tool_formats.deepseek import V31
from gateway.tools import MAX_TOOLS, ToolCall
from mesh.errors import Overloaded
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import Mesh, running_mesh
from tests.support.oracle_texts import answering, prompt_of, spelled

PATH = "/v1/messages"
END = "<｜end▁of▁sentence｜>"
HELLO: Any = [{"role": "user", "content": "hello"}]
ASKED: Any = {"model": "oracle", "max_tokens": 1000, "messages": HELLO}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object"}}
CALLS = [ToolCall("", "weather", '{"city": "Bergen"}'), ToolCall("", "clock", "{}")]
CACHED = {"type": "ephemeral"}
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


# To import the package takes two seconds: one process runs these tests, and no other imports it.
pytestmark = pytest.mark.xdist_group("anthropic")


def sdk() -> Any:
    return import_module("anthropic")


def client(mesh: Mesh, key: str = "unused") -> Any:
    made = sdk().AsyncAnthropic(base_url=f"http://127.0.0.1:{mesh.http_port}", api_key=key, max_retries=0)
    mesh.stack.push_async_callback(made.close)
    return made


async def test_an_answer_is_its_thinking_and_a_text() -> None:
    async with running_mesh(answering("hm</think>héllo" + END)) as mesh:
        answer: Any = await client(mesh).messages.create(**ASKED, system="Be nice.", thinking=THINK)
        assert [(block.type, getattr(block, block.type)) for block in answer.content] == [
            ("thinking", "hm"),
            ("text", "héllo"),
        ]
        assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, "oracle")
        prompt = mesh.worker.submissions[0].token_ids
        assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(prompt)
        assert answer.usage.output_tokens == len(spelled("hm</think>héllo" + END))
        assert prompt_of(mesh).startswith("<｜begin▁of▁sentence｜>Be nice.<｜User｜>hello")


async def test_a_stream_brings_the_same_blocks_in_events() -> None:
    async with running_mesh(answering(f"hm</think>One.{V31.calls(CALLS)}{END}")) as mesh:
        asked: Any = {**ASKED, "tools": [WEATHER, CLOCK], "thinking": THINK}
        whole: Any = await client(mesh).messages.create(**asked)
        stream = await client(mesh).messages.create(**asked, stream=True)
        kinds = [event.type async for event in stream]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
        async with client(mesh).messages.stream(**asked) as events:
            final: Any = await events.get_final_message()
        assert shown(final) == shown(whole)
        assert [(block.name, block.input) for block in whole.content[2:]] == [
            ("weather", {"city": "Bergen"}),
            ("clock", {}),
        ]
        assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
        raw = await mesh.http.post(PATH, json={**ASKED, "stream": True})
        assert raw.text.startswith('event: message_start\ndata: {"type":"message_start"')
        assert raw.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def shown(message: Any) -> list[Any]:
    """The blocks without the ids of calls, which differ each time."""
    return [{key: value for key, value in block.to_dict().items() if key != "id"} for block in message.content]


async def test_blocks_of_earlier_turns_become_messages_of_the_chat() -> None:
    turns: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "And in Bergen?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hidden", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bergen"}},
                {"type": "tool_use", "id": "b", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": "broken", "is_error": True},
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    async with running_mesh(answering("Rain." + END)) as mesh:
        answer = await client(mesh).messages.create(
            model="oracle", max_tokens=100, messages=turns, tools=[WEATHER, CLOCK]
        )
        prompt = prompt_of(mesh)
        calls = [ToolCall("", "weather", '{"city":"Bergen"}'), CALLS[1]]
        called = prompt.index("I look." + V31.calls(calls), prompt.index("And in Bergen?"))
        results = prompt.index(V31.outputs(["rain", "Error: broken"]), called)
        assert prompt.index("So?", results)
        assert "hidden" not in prompt
        # What came out may go in as it is.
        back: Any = [*turns, {"role": "assistant", "content": answer.content}, *HELLO]
        await client(mesh).messages.create(model="oracle", max_tokens=100, messages=back, tools=[WEATHER, CLOCK])
        assert prompt_of(mesh).index("Rain.") < prompt_of(mesh).index("hello")


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "clock"}, {"type": "any"}])
async def test_the_tool_that_must_be_called_begins_in_the_prompt(choice: Any) -> None:
    async with running_mesh(answering("{}<｜tool▁call▁end｜>" + END)) as mesh:
        tools = [CLOCK] if choice["type"] == "any" else [WEATHER, CLOCK]
        answer: Any = await client(mesh).messages.create(**ASKED, tools=tools, tool_choice=choice)
        assert [block.name for block in answer.content] == ["clock"]
        assert prompt_of(mesh).endswith("clock<｜tool▁sep｜>")


async def test_models_think_only_if_they_are_asked_to() -> None:
    think = spelled("<think>")[0]
    async with running_mesh() as mesh:
        for thinking, opened in ((None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True)):
            body = {**ASKED, "max_tokens": 1, "thinking": thinking}
            assert (await mesh.http.post(PATH, json=body)).status_code == 200
            assert (think in mesh.worker.submissions[-1].token_ids) == opened


async def test_the_reason_why_an_answer_stopped_is_told() -> None:
    async with running_mesh(answering("one STOP two")) as mesh:
        stopped = await client(mesh).messages.create(**ASKED, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        cut = await client(mesh).messages.create(**{**ASKED, "max_tokens": 2})
        assert cut.stop_reason == "max_tokens"
    text = '{"city": "Ber'
    async with running_mesh(answering(text)) as mesh:
        asked = {**ASKED, "max_tokens": len(spelled(text)), "tools": [WEATHER]}
        broken: Any = await client(mesh).messages.create(**asked, tool_choice={"type": "any"})
        assert (broken.stop_reason, broken.content[0].input) == ("max_tokens", {})


async def test_the_answer_is_held_to_a_schema() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    async with running_mesh(answering('{"city": "Oslo"}' + END)) as mesh:
        format: Any = {"type": "json_schema", "schema": schema}
        await client(mesh).messages.create(**ASKED, output_config={"format": format})
        assert '"city"' in mesh.worker.submissions[0].constraint.grammar


async def test_the_tokens_of_a_prompt_are_counted_without_an_answer() -> None:
    async with running_mesh() as mesh:
        asked: Any = {"model": "oracle", "messages": HELLO, "tools": [WEATHER]}
        counted = await client(mesh).messages.count_tokens(**asked)
        await client(mesh).messages.create(**asked, max_tokens=1)
        assert counted.input_tokens == len(mesh.worker.submissions[0].token_ids)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "an unknown field": ({"max_token": 3}, "max_token"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type"),
    "a result of the assistant's": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
        "content[0].type",
    ),
    "a call without its name": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}, *HELLO]},
        "content[0].name",
    ),
    "an answer that is begun": ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages[1]"),
    "a tool of Anthropic's": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    "too many tools": ({"tools": [{"type": "bash_20250124", "name": "bash"}] * (MAX_TOOLS + 1)}, "tools"),
    "too many messages": ({"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)}, "messages"),
    "too many blocks": ({"messages": [{"role": "user", "content": [{"type": "x"}] * (MAX_MESSAGES + 1)}]}, "messages"),
    "a tool with a wrong name": ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    "a choice that is none": ({"tools": [CLOCK], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    "a tool that is not there": ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "arguments that are none": (
        {"tools": [{"name": "a", "input_schema": {"type": "strin"}, "strict": True}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    "a schema that is none": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
        "output_config.format.schema",
    ),
    "a schema that does not fit": (
        {"max_tokens": 3, "output_config": {"format": {"type": "json_schema", "schema": {"const": "long"}}}},
        "max_tokens",
    ),
    "a tool that is chosen without its name": ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a choice of nothing": ({"tool_choice": {"type": "any"}}, "tools"),
    "servers of tools": ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
}


async def test_what_is_wrong_is_named_in_anthropics_form() -> None:
    async with running_mesh() as mesh:
        for name, (body, field) in BAD.items():
            answer = await mesh.http.post(PATH, json={**ASKED, **body})
            assert answer.status_code == 400, name
            told = answer.json()
            assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error"), name
            assert told["error"]["param"].endswith(field), name
        with pytest.raises(sdk().NotFoundError):
            await client(mesh).messages.create(**{**ASKED, "model": "other"})
        assert mesh.scheduler.queries == []


async def test_arguments_that_are_no_text_are_refused() -> None:
    async with running_mesh() as mesh:
        call = b'{"type":"tool_use","id":"a","name":"clock","input":{"at":"\xff"}}'
        answer = await mesh.http.post(
            f"{PATH}/count_tokens", content=b'{"messages":[{"role":"assistant","content":[%b]}]}' % call
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[0].input"


async def test_an_error_ends_the_stream_with_an_event() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        stream = await client(mesh).messages.create(**ASKED, stream=True)
        with pytest.raises(sdk().APIStatusError, match="out of order"):
            async for event in stream:
                if event.type == "content_block_delta":
                    mesh.worker.fail(Overloaded("out of order"))


async def test_the_key_is_what_anthropics_clients_send() -> None:
    keys = (ApiKeyConfig.model_validate({"name": "alice", "key": "alice-secret"}),)
    async with running_mesh(api_keys=keys) as mesh:
        answer = await client(mesh, "alice-secret").messages.create(**cast(Any, {**ASKED, "max_tokens": 1}))
        assert answer.stop_reason == "max_tokens"
        with pytest.raises(sdk().AuthenticationError):
            await client(mesh).messages.create(**ASKED)
        with pytest.raises(sdk().AuthenticationError):
            await client(mesh).messages.count_tokens(model="oracle", messages=HELLO)

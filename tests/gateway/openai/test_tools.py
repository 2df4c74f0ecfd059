"""Tools over HTTP with the `openai` package: what the model reads, and its calls whole and streamed."""

import json
from typing import Any

import pytest

from gateway.tool_formats.deepseek import V31
from gateway.tool_formats.deepseek_reader import CALLS_BEGIN
from gateway.tools import ToolCall
from tests.support.gateways import running_mesh
from tests.support.openai_calls import CHAT, HELLO, client
from tests.support.oracle_texts import answering, prompt_of, spelled

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALLS = [ToolCall("", "weather", '{"city": "Bergen"}'), ToolCall("", "clock", "{}")]
END = "<｜end▁of▁sentence｜>"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_calls_are_read_out_of_the_answer() -> None:
    text = "<think>which?</think>One moment." + V31.calls(CALLS) + END
    async with running_mesh(answering(text)) as mesh:
        answer = await client(mesh).chat.completions.create(model="oracle", messages=HELLO, tools=[WEATHER, CLOCK])
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("One moment.", "tool_calls")
        calls: Any = choice.message.tool_calls
        assert [(each.function.name, each.function.arguments) for each in calls] == [
            ("weather", '{"city": "Bergen"}'),
            ("clock", "{}"),
        ]
        assert len({each.id for each in calls}) == 2
        assert "### weather\nThe weather of a city" in prompt_of(mesh)


async def test_calls_stream_as_deltas_of_their_arguments() -> None:
    async with running_mesh(answering(V31.calls(CALLS) + END, step_seconds=0.001)) as mesh:
        stream = await client(mesh).chat.completions.create(
            model="oracle", messages=HELLO, tools=[WEATHER, CLOCK], stream=True
        )
        chunks = [chunk async for chunk in stream]
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        arguments = ["", ""]
        for delta in deltas:
            assert delta.function is not None
            arguments[delta.index] += delta.function.arguments or ""
        assert arguments == ['{"city": "Bergen"}', "{}"]
        named = [(each.index, each.type, each.function and each.function.name) for each in deltas if each.id]
        assert named == [(0, "function", "weather"), (1, "function", "clock")]
        assert len(deltas) > 3
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)


async def test_an_answer_without_calls_stays_an_answer() -> None:
    async with running_mesh(answering("no need" + END)) as mesh:
        answer = await client(mesh).chat.completions.create(model="oracle", messages=HELLO, tools=[WEATHER])
        (choice,) = answer.choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("no need", None, "stop")


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_named_tool_is_called_whatever_the_model_would_do(thinking: bool) -> None:
    async with running_mesh(answering('{"city": "Oslo"}<｜tool▁call▁end｜>' + END)) as mesh:
        answer = await client(mesh).chat.completions.create(
            model="oracle",
            messages=HELLO,
            tools=[WEATHER, CLOCK],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            extra_body={"chat_template_kwargs": {"thinking": thinking}},
        )
        calls: Any = answer.choices[0].message.tool_calls
        assert [(each.function.name, each.function.arguments) for each in calls] == [("weather", '{"city": "Oslo"}')]
        assert prompt_of(mesh).endswith("</think>" + "\n\n" * thinking + V31.opening("weather"))


async def test_a_required_call_begins_in_the_prompt() -> None:
    async with running_mesh(answering("clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>" + END)) as mesh:
        for tools in ([WEATHER, CLOCK], [CLOCK]):
            answer = await client(mesh).chat.completions.create(
                model="oracle", messages=HELLO, tools=tools, tool_choice="required"
            )
            calls: Any = answer.choices[0].message.tool_calls
            assert calls[0].function.name == "clock"
            known = "clock" if len(tools) == 1 else None
            assert prompt_of(mesh).endswith(V31.opening(known))


async def test_the_model_is_shown_the_tools_that_are_allowed() -> None:
    async with running_mesh(answering("{}<｜tool▁call▁end｜>" + END)) as mesh:
        body = {"messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": allowed("required", "clock")}
        answer = (await mesh.http.post(CHAT, json=body)).json()["choices"][0]
        assert "The weather of a city" not in prompt_of(mesh)
        assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["clock"]


async def test_the_model_sees_no_tools_it_may_not_call() -> None:
    text = V31.calls(CALLS) + END
    async with running_mesh(answering(text)) as mesh:
        answer = await client(mesh).chat.completions.create(
            model="oracle", messages=HELLO, tools=[WEATHER], tool_choice="none"
        )
        assert answer.choices[0].message.tool_calls is None
        assert "weather" not in prompt_of(mesh)


async def test_without_parallel_calls_only_one_is_reported() -> None:
    async with running_mesh(answering(V31.calls(CALLS) + END)) as mesh:
        answer = await client(mesh).chat.completions.create(
            model="oracle", messages=HELLO, tools=[WEATHER, CLOCK], parallel_tool_calls=False
        )
        assert len(answer.choices[0].message.tool_calls or ()) == 1


async def test_the_model_reads_results_in_the_calls_order() -> None:
    sent = [
        {"id": f"call_{index}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for index, call in enumerate(CALLS)
    ]
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": sent},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_0", "content": "rain <｜tool▁output▁end｜>"},
    ]
    async with running_mesh(answering("It rains at noon." + END)) as mesh:
        await client(mesh).chat.completions.create(model="oracle", messages=messages, tools=[WEATHER, CLOCK])
        prompt = prompt_of(mesh)
        called = prompt.index(V31.calls(CALLS))
        assert prompt.index(V31.outputs(["rain <｜tool▁output▁end｜>", "noon"])) > called


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "another kind of tool": ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0].type"),
    "a bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    "the same name twice": ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
    "strict without tokens that begin a call": (
        {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
        "tools",
    ),
    "a choice that is none": ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
    "a choice of no kind": ({"tools": [CLOCK], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    "a choice without its tool": ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    "a choice among tools that are not there": (
        {"tools": [CLOCK], "tool_choice": allowed("required", "weather")},
        "tool_choice.allowed_tools.tools",
    ),
    "arguments that are none": (
        {
            "tools": [
                CLOCK,
                {"type": "function", "function": {"name": "w", "parameters": {"type": "strin"}, "strict": True}},
            ],
            "tool_choice": "required",
        },
        "tools[1].function.parameters",
    ),
    "a choice of nothing": ({"tool_choice": "required"}, "tool_choice"),
    "a choice that is not there": (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        "tool_choice",
    ),
    "a result of no call": (
        {"messages": [*HELLO, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
        "messages[1].tool_call_id",
    ),
    "a call of a user's": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": "",
                    "tool_calls": [{"id": "x", "function": {"name": "a", "arguments": "{}"}}],
                },
            ]
        },
        "messages[0].tool_calls",
    ),
}


async def test_bad_tools_are_refused_by_field() -> None:
    async with running_mesh() as mesh:
        for name, (body, field) in BAD.items():
            answer = await mesh.http.post(CHAT, json={"messages": HELLO, **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (name, answer.text)
        assert mesh.scheduler.queries == []


async def test_an_answer_cut_off_in_a_call_says_so() -> None:
    text = V31.opening("weather") + '{"city": "Ber'
    async with running_mesh(answering(text)) as mesh:
        body = {"messages": HELLO, "tools": [WEATHER], "max_tokens": len(spelled(text)), "n": 2}
        choices = (await mesh.http.post(CHAT, json=body)).json()["choices"]
        for choice in choices:
            assert choice["finish_reason"] == "length"
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ber'
            assert choice["message"]["content"] is None
        assert CALLS_BEGIN not in json.dumps(choices, ensure_ascii=False)


async def test_a_too_deeply_nested_schema_is_refused_by_field() -> None:
    depth = 600
    schema = '{"items":' * depth + "{}" + "}" * depth
    async with running_mesh() as mesh:
        body = json.dumps({"messages": HELLO, "tools": [WEATHER]}).replace(
            '"parameters": {', f'"parameters": {{"not": {schema}, '
        )
        answer = await mesh.http.post("/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.parameters")


async def test_no_depth_of_a_schema_is_an_error_of_ours() -> None:
    """Around the deepest that can be read, which depends on the caller's own depth, nothing can be written."""
    async with running_mesh() as mesh:
        for depth in range(920, 945):
            nested = b'{"a":' * depth + b"1" + b"}" * depth
            for field in (b'"tools":[{"function":{"name":"f","parameters":%b}}]', b'"guided_json":%b'):
                content = b'{"messages":[{"role":"user","content":"hi"}],%b}' % (field % nested)
                answer = await mesh.http.post("/v1/chat/completions", content=content)
                assert answer.status_code == 400, (depth, field)

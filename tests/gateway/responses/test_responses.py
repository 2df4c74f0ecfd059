"""The Responses API with the `openai` package: items in, items out, whole and streamed."""

from contextlib import suppress
from typing import Any, cast

import openai
import pytest

from gateway.config import ApiKeyConfig
from gateway.openai.parsing import parse
from gateway.requests import MAX_MESSAGES
from gateway.responses.body import ResponseRequest
from gateway.responses.form import ResponsesForm
from gateway.tool_formats.deepseek import V31
from gateway.tools import MAX_TOOLS, ToolCall
from mesh.errors import InvalidRequest, Overloaded
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import running_mesh
from tests.support.openai_calls import client
from tests.support.oracle_texts import answering, prompt_of, spelled

PATH = "/v1/responses"
END = "<｜end▁of▁sentence｜>"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK: Any = {"type": "function", "name": "clock"}
CALLS = [ToolCall("", "weather", '{"city": "Bergen"}'), ToolCall("", "clock", "{}")]


async def test_an_answer_is_its_reasoning_and_a_message() -> None:
    async with running_mesh(answering("<think>hm</think>héllo" + END)) as mesh:
        response = await client(mesh).responses.create(model="oracle", input="hi", instructions="Be nice.")
        reasoning, message = cast(Any, response.output)
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
        assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
        assert (response.output_text, response.status, response.instructions) == ("héllo", "completed", "Be nice.")
        assert response.usage is not None
        assert response.usage.input_tokens == len(mesh.worker.submissions[0].token_ids)
        assert response.usage.output_tokens_details.reasoning_tokens == len(spelled("<think>hm</think>"))
        assert prompt_of(mesh).startswith("<｜begin▁of▁sentence｜>Be nice.<｜User｜>hi")


async def test_a_stream_brings_the_same_items_in_events() -> None:
    calls = V31.calls(CALLS)
    async with running_mesh(answering(f"<think>hm</think>One moment.{calls}{END}")) as mesh:
        asked: Any = {"model": "oracle", "input": "hi", "tools": [WEATHER, CLOCK]}
        whole = await client(mesh).responses.create(**asked)
        async with client(mesh).responses.stream(**asked) as stream:
            events: Any = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        for kind in ("output_item.added", "output_item.done"):
            assert kinds.count(f"response.{kind}") == 4
        texts: dict[str, str] = {}
        for event in events:
            if "delta" in event.type:
                texts[event.type] = texts.get(event.type, "") + event.delta
        assert texts == {
            "response.reasoning_text.delta": "hm",
            "response.output_text.delta": "One moment.",
            "response.function_call_arguments.delta": '{"city": "Bergen"}{}',
        }
        assert shown(final) == shown(whole)
        first: Any = whole.output[2]
        assert (first.type, first.name, first.arguments) == ("function_call", "weather", '{"city": "Bergen"}')
        assert first.call_id.startswith("call_")
        raw = await mesh.http.post(PATH, json={"input": "hi", "stream": True})
        assert raw.text.startswith("event: response.created\ndata: {")
        assert raw.text.endswith("\n\ndata: [DONE]\n\n")


def shown(response: Any) -> list[Any]:
    """The items without the ids, which differ each time."""
    unique = {"id", "call_id", "parsed", "parsed_arguments"}
    return [
        {key: value for key, value in item.to_dict().items() if key not in unique and key != "content"}
        | {"texts": [part.text for part in getattr(item, "content", ())]}
        for item in response.output
    ]


async def test_items_of_earlier_turns_become_messages_of_the_chat() -> None:
    given: Any = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "And in "}, {"type": "input_text", "text": "Bergen?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hidden"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Bergen"}'},
        {"type": "function_call", "call_id": "b", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "noon"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    async with running_mesh(answering("Rain at noon." + END)) as mesh:
        response = await client(mesh).responses.create(model="oracle", input=given, tools=[WEATHER, CLOCK])
        assert response.output_text == "Rain at noon."
        prompt = prompt_of(mesh)
        asked = prompt.index("<｜User｜>And in Bergen?")
        called = prompt.index("I look." + V31.calls(CALLS), asked)
        assert prompt.index(V31.outputs(["rain", "noon"])) > called
        assert "hidden" not in prompt
        # What came out may go in as it is.
        back: Any = [*given, *(item.to_dict() for item in response.output), {"role": "user", "content": "Thanks"}]
        assert (await client(mesh).responses.create(model="oracle", input=back)).status == "completed"
        assert prompt_of(mesh).index("Rain at noon.") < prompt_of(mesh).index("<｜User｜>Thanks")


@pytest.mark.parametrize(
    "choice",
    [{"type": "function", "name": "clock"}, {"type": "allowed_tools", "mode": "required", "tools": [CLOCK]}],
)
async def test_the_tool_that_must_be_called_begins_in_the_prompt(choice: Any) -> None:
    async with running_mesh(answering("{}<｜tool▁call▁end｜>" + END)) as mesh:
        response = await client(mesh).responses.create(
            model="oracle", input="hi", tools=[WEATHER, CLOCK], tool_choice=choice
        )
        assert [getattr(item, "name", None) for item in response.output] == ["clock"]
        assert prompt_of(mesh).endswith("clock<｜tool▁sep｜>")


async def test_the_answer_is_held_to_a_schema_behind_free_reasoning() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    format: Any = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    async with running_mesh(answering('{"city": "Oslo"}' + END)) as mesh:
        response = await client(mesh).responses.create(
            model="oracle", input="hi", text={"format": format}, reasoning={"effort": "high"}
        )
        constraint = mesh.worker.submissions[0].constraint
        assert '"city"' in constraint.grammar
        assert constraint.HasField("free_until")
        assert response.to_dict()["text"]["format"] == {**format, "description": None}


async def test_reasoning_is_switched_by_its_effort() -> None:
    think = spelled("<think>")[0]
    async with running_mesh() as mesh:
        for effort, opened in (("high", True), ("none", False)):
            body: Any = {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": effort}}
            answer = (await mesh.http.post(PATH, json=body)).json()
            assert (think in mesh.worker.submissions[-1].token_ids) == opened
            assert answer["reasoning"] == {"effort": effort, "summary": None}


async def test_an_answer_that_is_cut_off_says_so() -> None:
    async with running_mesh() as mesh:
        answer = (await mesh.http.post(PATH, json={"input": "hi", "max_output_tokens": 3})).json()
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (answer["output"][-1]["status"], answer["completed_at"]) == ("incomplete", None)
        streamed = await mesh.http.post(PATH, json={"input": "hi", "max_output_tokens": 3, "stream": True})
        assert "event: response.incomplete\n" in streamed.text


async def test_log_probabilities_are_those_of_the_message() -> None:
    async with running_mesh(answering("<think>hm</think>hé" + END)) as mesh:
        for wanted in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
            (_, message) = (await mesh.http.post(PATH, json={"input": "hi", **wanted})).json()["output"]
            reported = message["content"][0]["logprobs"]
            assert b"".join(bytes(each["bytes"]) for each in reported).decode() == "hé"
            assert len(reported[0]["top_logprobs"]) == wanted.get("top_logprobs", 0)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "an answer before it": ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
    "to be stored": ({"store": True}, "unsupported_parameter", "store"),
    "to be stored, in a number": ({"store": 0}, "invalid_type", "store"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "unsupported_parameter",
        "input[0].content[0].type",
    ),
    "an item that is stored": (
        {"input": [{"type": "item_reference", "id": "x"}]},
        "unsupported_parameter",
        "input[0].type",
    ),
    "a call without its id": (
        {"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]},
        "missing_required_parameter",
        "input[0].call_id",
    ),
    "a role that is none": ({"input": [{"role": "robot", "content": "x"}]}, "invalid_value", "input[0].role"),
    "a tool of OpenAI's": ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    "too many tools": ({"tools": [{"type": "web_search"}] * (MAX_TOOLS + 1)}, "invalid_value", "tools"),
    "too many items": ({"input": [{"type": "item_reference"}] * (MAX_MESSAGES + 1)}, "invalid_value", "input"),
    "an unknown field": ({"max_tokens": 3}, "unknown_parameter", "max_tokens"),
    "a format without schema": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "missing_required_parameter",
        "text.format.schema",
    ),
    "no room": ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    "what cannot be included": ({"include": ["web_search_call.results"]}, "unsupported_parameter", "include[0]"),
    "a tool with a wrong name": ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
    "a choice that is none": ({"tools": [CLOCK], "tool_choice": "maybe"}, "invalid_value", "tool_choice"),
    "a named tool that is not there": (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "name": "weather"}},
        "invalid_value",
        "tool_choice",
    ),
    "arguments that are none": (
        {
            "tools": [CLOCK, {"type": "function", "name": "a", "parameters": {"type": "strin"}, "strict": True}],
            "tool_choice": "required",
        },
        "invalid_constraint",
        "tools[1].parameters",
    ),
    "a schema that is none": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}, "strict": True}}},
        "invalid_constraint",
        "text.format.schema",
    ),
    "a schema that does not fit": (
        {"max_output_tokens": 3, "text": {"format": {"type": "json_schema", "name": "a", "schema": {"const": "long"}}}},
        "invalid_constraint",
        "max_output_tokens",
    ),
    "no item": ({"input": []}, "invalid_value", "input"),
    "the result of no call": (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
        "invalid_value",
        "input",
    ),
    "more than the context": ({"max_output_tokens": 10**6}, "context_length_exceeded", "max_output_tokens"),
    "a tool that is not there": (
        {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "tools": [WEATHER]}},
        "invalid_value",
        "tool_choice.tools",
    ),
}


async def test_what_is_wrong_is_named_by_its_field() -> None:
    async with running_mesh() as mesh:
        for name, (body, code, field) in BAD.items():
            answer = await mesh.http.post(PATH, json={"input": "hi", **body})
            error = answer.json().get("error") or {}
            assert answer.status_code == 400, name
            assert (error["code"], error["param"]) == (code, field), name
        assert mesh.scheduler.queries == []


def test_what_can_be_read_can_be_repeated_in_every_event() -> None:
    opened = set[bool]()
    # Around the deepest that is read, which depends on the caller's own depth.
    for depth in range(850, 1000):
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        with suppress(InvalidRequest):
            body = parse(ResponseRequest, b'{"input":"hi","tools":[{"name":"f","parameters":%b}]}' % nested).body
            with suppress(InvalidRequest):
                form = ResponsesForm.of(body, "oracle", None)
                assert all(nested in event.data for event in form.opening(0))
                opened.add(True)
                continue
            opened.add(False)
    assert opened == {True, False}


async def test_an_error_ends_the_stream_with_an_event() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        stream = await client(mesh).responses.create(model="oracle", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="out of order"):
            async for event in stream:
                if event.type == "response.output_text.delta":
                    mesh.worker.fail(Overloaded("out of order"))


async def test_a_key_is_needed_where_there_are_keys() -> None:
    keys = (ApiKeyConfig.model_validate({"name": "alice", "key": "alice-secret"}),)
    async with running_mesh(api_keys=keys) as mesh:
        body = {"input": "hi", "max_output_tokens": 1}
        assert (await mesh.http.post(PATH, json=body)).status_code == 401
        headers = {"authorization": "Bearer alice-secret"}
        assert (await mesh.http.post(PATH, json=body, headers=headers)).status_code == 200

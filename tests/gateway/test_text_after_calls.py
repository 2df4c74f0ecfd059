"""A model may speak between its calls and after them: each API brings that text, and the calls stay whole."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.choices import Piece
from gateway.messages.form import MessagesForm
from gateway.openai.form import Form
from gateway.responses.body import ResponseRequest
from gateway.responses.form import ResponsesForm
from gateway.text.delta import Delta, Finish, Usage
from gateway.tools import ToolCallDelta
from mesh.domain.outputs import CachedTokens, FinishReason
from tests.support.gateways import running_mesh
from tests.support.oracle_texts import answering

USAGE = Usage(1, 3, CachedTokens(), 0)
DELTAS = [
    Delta([1], "", "", calls=[ToolCallDelta(0, '{"a": ', "c0", "weather")]),
    # The end of one call, text, and another call.
    Delta([2], "And also:", "", calls=[ToolCallDelta(0, "1}"), ToolCallDelta(1, "{}", "c1", "clock")]),
    Delta([3], "Done.", "", finish=Finish(FinishReason.STOP, USAGE, called_tools=True)),
]
FORMS: dict[str, Callable[[], Form]] = {
    "responses": lambda: ResponsesForm.of(ResponseRequest(input="hi"), "m", None),
    "messages": lambda: MessagesForm("x", "m"),
}


async def events_of(form: Form) -> list[dict[str, Any]]:
    events = [event for delta in DELTAS for event in form.chunk(Piece(0, delta, USAGE))]
    return [json.loads(event.data) for event in [*events, *await form.closing()]]


@pytest.mark.parametrize("kind", FORMS)
async def test_text_after_a_call_is_its_own_item(kind: str) -> None:
    events = await events_of(FORMS[kind]())
    if kind == "responses":
        kinds = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
        assert kinds == ["function_call", "message", "function_call", "message"]
        output = events[-1]["response"]["output"]
        assert [item["arguments"] for item in output if item["type"] == "function_call"] == ['{"a": 1}', "{}"]
    else:
        blocks = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert blocks == ["tool_use", "text", "tool_use", "text"]


async def test_a_marker_hides_nothing_of_an_answer() -> None:
    text = "Models write <｜tool▁calls▁begin｜> before calls."
    tools = [{"type": "function", "function": {"name": "clock"}}]
    async with running_mesh(answering(text + "<｜end▁of▁sentence｜>")) as mesh:
        body = {"messages": [{"role": "user", "content": "q"}], "tools": tools}
        (choice,) = (await mesh.http.post("/v1/chat/completions", json=body)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")

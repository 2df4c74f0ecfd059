"""Answers of a form in OpenAI's words: what a worker is sent, and what is refused."""

from typing import Any

import pytest

from mesh.errors import InvalidConstraint
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import running_mesh
from tests.support.oracle_texts import answering

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

# {"aaa":0,"bbb":0,...}
LONG = {"type": "object", "properties": {name * 3: {"type": "integer"} for name in "abcdefg"}, "required": []}
LONG["required"] = list(LONG["properties"])

ASKED: dict[str, dict[str, Any]] = {
    "json schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    },
    "json object": {"response_format": {"type": "json_object"}},
    "structured json": {"structured_outputs": {"json": SCHEMA}},
    "structured object": {"structured_outputs": {"json_object": True}},
    "structured regex": {"structured_outputs": {"regex": "a+"}},
    "structured choice": {"structured_outputs": {"choice": ["a", "b"]}},
    "structured grammar": {"structured_outputs": {"grammar": 'start: "a"'}},
    "guided json": {"guided_json": '{"type": "object"}'},
    "guided regex": {"guided_regex": "a+"},
    "guided choice": {"guided_choice": ["a", "b"]},
    "guided grammar": {"guided_grammar": 'root ::= "a"'},
    "regex": {"regex": "a+"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "a named tool": {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
    "a required tool": {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": "required",
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a type that is none": ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
    # The library cuts what it tells of it within a character, and panics.
    "a value that is none": ({"guided_json": {"minimum": ["a" + "é" * 100]}}, "guided_json", "wrong value"),
    "a keyword that cannot be enforced": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"not": {}}, "strict": True},
            }
        },
        "response_format.json_schema.schema",
        "not",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "lacks"),
    "a schema that is no object": ({"guided_json": "[1]"}, "guided_json", "object"),
    "look-around": ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    "a grammar that is none": ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    "a grammar that ends early": ({"guided_grammar": "root ::= ["}, "guided_grammar", "cannot be read"),
    "a grammar without rules": ({"guided_grammar": "nothing"}, "guided_grammar", "cannot be read"),
    "much that is no grammar": ({"guided_grammar": "\n" * 1_000_000}, "guided_grammar", "limit"),
    "too large": ({"guided_json": {"enum": [f"{n:040}" for n in range(9000)]}}, "guided_json", "limit"),
    "choices that are too large": ({"guided_choice": ["a" * 300_000], "max_tokens": 9}, "guided_choice", "limit"),
    "two at once": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude"),
    "a schema that does not fit": (
        {"guided_json": LONG, "max_completion_tokens": 40},
        "max_completion_tokens",
        "50 tokens",
    ),
    "arguments that do not fit": (
        {
            "tools": [{"type": "function", "function": {"name": "w", "parameters": LONG}}],
            "tool_choice": "required",
            "max_tokens": 40,
        },
        "max_tokens",
        "50 tokens",
    ),
    "choices that do not fit": ({"guided_choice": ["a" * 50], "max_tokens": 9}, "max_tokens", "50 tokens"),
    "a strict tool's schema": (
        {
            "tools": [{"type": "function", "function": {"name": "w", "parameters": {"not": {}}, "strict": True}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
        "not",
    ),
}


async def test_what_is_asked_for_reaches_the_worker_as_a_grammar() -> None:
    async with running_mesh() as mesh:
        for name, fields in ASKED.items():
            answer = await mesh.http.post(CHAT, json={"messages": HELLO, "max_tokens": 8, **fields})
            assert answer.status_code == 200, (name, answer.text)
            assert mesh.worker.submissions[-1].constraint.grammar, name
        await mesh.http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "response_format": {"type": "text"}})
        assert not mesh.worker.submissions[-1].HasField("constraint")


async def test_what_cannot_be_constrained_is_refused_by_field() -> None:
    async with running_mesh() as mesh:
        for name, (fields, param, words) in REFUSED.items():
            answer = await mesh.http.post(CHAT, json={"messages": HELLO, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (name, error)
            assert words in error["message"], (name, error)
        assert mesh.scheduler.queries == []


@pytest.mark.parametrize(
    ("name", "param"),
    [
        ("json schema", "response_format.json_schema.schema"),
        ("guided grammar", "guided_grammar"),
        ("a named tool", "tools"),
    ],
)
async def test_what_only_a_worker_finds_is_refused_by_field_too(name: str, param: str) -> None:
    async with running_mesh(FakeDecodeWorker(refusals=[InvalidConstraint("too complex")])) as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, **ASKED[name]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_constraint", param)


async def test_bad_words_and_the_least_tokens_reach_the_worker() -> None:
    async with running_mesh() as mesh:
        body = {"messages": HELLO, "max_tokens": 8, "bad_words": ["ab"], "min_tokens": 2}
        assert (await mesh.http.post(CHAT, json=body)).status_code == 200
        constraint = mesh.worker.submissions[-1].constraint
        assert (constraint.grammar, constraint.min_tokens) == ("", 2)
        assert len(constraint.banned) == 2 and all(sequence.token_ids for sequence in constraint.banned)


@pytest.mark.parametrize("fields", [{"min_tokens": 9, "max_tokens": 8}, {"min_tokens": -1}, {"bad_words": [""]}])
async def test_bans_that_make_no_sense_are_refused_by_field(fields: dict[str, Any]) -> None:
    async with running_mesh() as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize("field", ["structured_outputs", "response_format"])
async def test_an_unknown_field_of_a_constraint_is_refused_by_name(field: str) -> None:
    async with running_mesh() as mesh:
        answer = await mesh.http.post(CHAT, json={"messages": HELLO, field: {"type": "text", "mood": 1}})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unknown_parameter"


@pytest.mark.parametrize("thinking", [True, False])
async def test_a_tag_in_a_constrained_answer_is_text(thinking: bool) -> None:
    text = "<think>x</think>y"
    async with running_mesh(answering("hm</think>" * thinking + text + "<｜end▁of▁sentence｜>")) as mesh:
        kwargs = {"thinking": thinking}
        body = {"messages": HELLO, "structured_outputs": {"choice": [text]}, "chat_template_kwargs": kwargs}
        (choice,) = (await mesh.http.post(CHAT, json=body)).json()["choices"]
        assert choice["message"]["content"] == text
        assert choice["message"]["reasoning_content"] == ("hm" if thinking else None)

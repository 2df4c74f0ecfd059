"""Bodies that would hold the event loop are refused before they are decoded; the largest prompts are not."""

import gc
import json
import time
from collections.abc import Callable

import pytest
from deepmesh.v1 import gateway_pb2

from gateway import json_cost, tool_wire
from gateway.config import GatewayServerConfig, HttpConfig, LimitsConfig
from gateway.forms import form_wire
from gateway.json_cost import MAX_MILLISECONDS, check_decoding, decoding_ms
from gateway.openai.parsing import parse
from gateway.openai.requests import ChatCompletionBody, CompletionBody
from gateway.requests import MAX_MESSAGES
from mesh.errors import BodyTooLarge, InvalidConstraint, InvalidRequest

LARGEST_BODY = HttpConfig().body_bytes
PROMPT_CHARACTERS = LimitsConfig().prompt_characters
# What a hostile list is filled with: each is the slowest of its kind.
HOSTILE = {
    "lists": "[]",
    "objects": "{}",
    "objects with a key": '{"":1}',
    "lists in lists": "[" * 900 + "]" * 900,
    "exponents": "1e300",
    "small numbers": "1e-320",
    "fractions": "9007199254740993.5",
    "long fractions": "0." + "0" * 310 + "1234567890123456",
    "long integers": "9" * 4000,
    "texts": '""',
    "escapes": '"\\\\\\""',
}


def body_of(element: str, size_bytes: int) -> bytes:
    """A chat with a list of as many elements as fit."""
    elements = ",".join([element] * (size_bytes // (len(element) + 1)))
    return b'{"metadata": {"a": [%s]}, "messages": [{"role": "user"}]}' % elements.encode()


def largest_accepted(body: Callable[[int], bytes]) -> bytes:
    """The largest body that is still decoded, found by bisection."""
    least, most = 0, LARGEST_BODY
    while most - least > 4096:
        middle = (least + most) // 2
        least, most = (middle, most) if decoding_ms(body(middle)) <= MAX_MILLISECONDS else (least, middle)
    return body(least)


@pytest.mark.parametrize("element", HOSTILE.values(), ids=HOSTILE)
def test_a_body_that_takes_long_to_decode_is_not_decoded(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = body_of(element, LARGEST_BODY)
    monkeypatch.setattr("msgspec.json.decode", lambda *_, **__: pytest.fail("the body was decoded"))
    with pytest.raises(BodyTooLarge, match="too many lists, objects, keys or numbers"):
        parse(ChatCompletionBody, body)


@pytest.mark.parametrize("element", HOSTILE.values(), ids=HOSTILE)
def test_what_is_decoded_takes_no_longer_than_estimated(element: str) -> None:
    body = largest_accepted(lambda size: body_of(element, size))
    # A gateway collects no garbage among what it has at its start. Here all that tests have imported would be searched.
    gc.disable()
    try:
        started = time.thread_time()
        parse(ChatCompletionBody, body)
        taken_ms = 1000 * (time.thread_time() - started)
    finally:
        gc.enable()
    # A busy machine may take some times as long as an idle one; without a limit it would take a hundred times as long.
    assert taken_ms < 6 * MAX_MILLISECONDS


@pytest.mark.parametrize("escaped", [False, True], ids=["in utf-8", "escaped"])
@pytest.mark.parametrize("character", ["a", "é", "中", '"', "\\", "\n"])
def test_the_longest_prompt_fits(character: str, escaped: bool) -> None:
    prompt = character * PROMPT_CHARACTERS
    body = json.dumps({"prompt": prompt}, ensure_ascii=escaped).encode()
    assert len(body) <= LARGEST_BODY
    assert parse(CompletionBody, body).body.prompt == prompt


def test_the_longest_prompt_fits_a_grpc_message() -> None:
    prompt = gateway_pb2.Prompt(text="\U0001f600" * PROMPT_CHARACTERS)
    assert gateway_pb2.GenerateRequest(prompt=prompt).ByteSize() <= GatewayServerConfig().max_message_bytes


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_longest_prompt_of_token_ids_fits(separators: tuple[str, str]) -> None:
    body = json.dumps({"prompt": [129_279] * PROMPT_CHARACTERS}, separators=separators).encode()
    assert len(body) <= LARGEST_BODY
    assert decoding_ms(body) <= MAX_MILLISECONDS


def test_the_longest_chat_fits() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    for messages in ([parts] * MAX_MESSAGES, [calling] * (MAX_MESSAGES // 2)):
        assert decoding_ms(json.dumps({"messages": messages}).encode()) <= MAX_MILLISECONDS


@pytest.mark.parametrize("text", ['[{,1e300, "a": \\"', "\\", '\\\\"', '"[' * 3, 'true"e'])
def test_text_counts_for_its_length_only(text: str) -> None:
    def cost(text: str) -> float:
        return decoding_ms(json.dumps({"a": text, "b": 'c"'}).encode())

    repeated = text * 10_000
    assert cost(repeated) <= 2 * cost("a" * len(repeated))


def test_words_are_no_exponents() -> None:
    assert decoding_ms(b"[true,false,null]") == decoding_ms(b"[1234,56789,1234]")


def test_texts_are_weighed_together() -> None:
    part = body_of("[]", LARGEST_BODY // 32).decode()
    check_decoding([part], "tools")
    with pytest.raises(InvalidConstraint, match="tools has too many"):
        check_decoding([part] * 8, "tools", InvalidConstraint)


def form_over_grpc(schema: str) -> object:
    return form_wire.answer_form(gateway_pb2.AnswerForm(json_schema=schema))


def tools_over_grpc(schema: str) -> object:
    return tool_wire.toolbox(gateway_pb2.Chat(tools=[gateway_pb2.Tool(name="a", parameters_json=schema)]))


def form_in_text(schema: str) -> object:
    return CompletionBody(prompt="a", guided_json=schema).form()


@pytest.mark.parametrize("read", [form_over_grpc, tools_over_grpc, form_in_text])
def test_a_schema_in_text_is_weighed_before_it_is_decoded(read: Callable[[str], object]) -> None:
    schema = body_of("[]", LARGEST_BODY).decode()
    with pytest.raises(InvalidRequest, match="too many lists"):
        read(schema)


def test_strings_are_not_split_if_there_are_millions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_cost, "_time_outside_strings", lambda _: pytest.fail("the text was split"))
    assert decoding_ms(b'"' * LARGEST_BODY) > MAX_MILLISECONDS

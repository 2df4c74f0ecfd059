"""What clients are told about a body that is no JSON, or JSON of another form."""

import pytest

from gateway.openai.malformed import MAX_SEARCHED_BYTES
from gateway.openai.parsing import parse
from gateway.openai.requests import ChatCompletionBody, CompletionBody
from mesh.errors import InvalidRequest

HALVES = {
    b'{"prompt": "\\ud800"}': ("prompt", r"\ud800"),
    b'{"prompt": "a\\uDC00b"}': ("prompt", r"\udc00"),
    b'{"prompt": "\\ud83d\\ude00", "stop": ["a", "\\udfff"]}': ("stop[1]", r"\udfff"),
    b'{"prompt": "a", "metadata": {"a": {"b": "\\ud800 "}}}': ("metadata.a.b", r"\ud800"),
    b'{"prompt": "a", "metadata": {"a\\ud800": 1}}': ("metadata", r"\ud800"),
    b'{"prompt": "a", "pro\\ud800mpt": 1}': (None, r"\ud800"),
}
OTHERS = {
    b"": "the body is empty",
    b" \n": "the body is empty",
    b'{"prompt": "a': "it ends too early",
    b'{"prompt": "a",}': "trailing comma",
    b'{"prompt": "\xc3\xa9\xff"}': "the body is not in UTF-8: byte 14 is 0xff",
    b'{"prompt": "a", "metadata": {"a": ' + b"[" * 5000: "nested too deep",
    # Text that only looks like half of a pair.
    b'{"prompt": "\\\\ud800"': "it ends too early",
    b'{"prompt": "\\ud800, and more", ]': "escaped utf-16 surrogate pair",
    b"[1]": "the body: expected `object`, got `array`",
    b'{"prompt": "a", "logit_bias": {"a": 1}}': "a key of logit_bias: expected `int`",
    b'{"messages": []}': "/v1/chat/completions takes it",
}


@pytest.mark.parametrize("body", HALVES, ids=range(len(HALVES)))
def test_half_of_a_surrogate_pair_is_told_with_its_field(body: bytes) -> None:
    field, half = HALVES[body]
    with pytest.raises(InvalidRequest) as raised:
        parse(CompletionBody, body)
    assert raised.value.metadata.get("field") == field
    assert f"{field or 'the body'} has half of a surrogate pair, {half}:" in raised.value.message


@pytest.mark.parametrize("body", OTHERS, ids=range(len(OTHERS)))
def test_a_malformed_body_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(CompletionBody, body)
    assert OTHERS[body] in raised.value.message


def test_a_prompt_sent_to_the_chat_is_redirected() -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions takes it"):
        parse(ChatCompletionBody, b'{"prompt": "a"}')


def test_a_long_body_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("json.loads", lambda _: pytest.fail("the body was searched"))
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse(CompletionBody, b'{"prompt": "%s\\ud800"}' % (b"a" * MAX_SEARCHED_BYTES))

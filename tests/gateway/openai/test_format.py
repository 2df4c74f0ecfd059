import asyncio
import threading
from typing import Any

import msgspec
import pytest

from gateway.choices import Piece
from gateway.openai.form import Answer, Form
from gateway.openai.format import ChatFormat, Head
from gateway.prompts.tokenizer import Tokenizer
from gateway.responses.body import ResponseRequest
from gateway.responses.form import ResponsesForm
from gateway.text.delta import LONG_REPORT, Delta, Finish, Usage, write_report
from mesh.domain.outputs import CachedTokens, FinishReason, Logprobs

END = Finish(FinishReason.LENGTH, Usage(1, 1, CachedTokens(), 0))


class NotedThreads(Tokenizer):
    """Spells all tokens alike, and notes who asks."""

    def __init__(self) -> None:
        self.asking: set[int] = set()

    def token_text(self, token_id: int) -> str:
        self.asking.add(threading.get_ident())
        return "a"

    def token_bytes(self, token_id: int) -> bytes:
        return b"a"


def scored(tokens: int, alternatives: int = 63) -> Delta:
    entry = Logprobs(-1.0, [*range(alternatives)], [-1.0] * alternatives)
    return Delta([7] * tokens, "a" * tokens, "", [entry] * tokens, finish=END)


def answer_of(delta: Delta) -> Answer:
    answer = Answer()
    answer.add(delta)
    return answer


def chat(tokenizer: Tokenizer, choices: int = 1) -> ChatFormat:
    head = Head("id", 0, "model", with_token_ids=False, with_usage=False, with_continuous_usage=False,
                choices_per_prompt=choices)  # fmt: skip
    return ChatFormat(head, tokenizer)


def response(tokenizer: Tokenizer) -> ResponsesForm:
    body = msgspec.json.decode(b'{"model": "model", "input": "hi"}', type=ResponseRequest)
    return ResponsesForm.of(body, "model", tokenizer)


@pytest.mark.parametrize(("choices", "alone"), [(1, True), (128, False)])
def test_many_log_probabilities_are_written_beyond_the_event_loop(choices: int, alone: bool) -> None:
    tokenizer = NotedThreads()
    answers = [answer_of(scored(1, LONG_REPORT // 128)) for _ in range(choices)]
    asyncio.run(chat(tokenizer, choices).whole(answers))
    assert (tokenizer.asking == {threading.get_ident()}) is alone


@pytest.mark.parametrize("form_of", [chat, response])
@pytest.mark.parametrize(("tokens", "alone"), [(1, True), (129, False)])
def test_a_late_readers_log_probabilities_are_written_beyond_the_loop(form_of: Any, tokens: int, alone: bool) -> None:
    tokenizer = NotedThreads()
    form: Form = form_of(tokenizer)
    piece = Piece(0, scored(tokens), END.usage)
    asyncio.run(write_report(form.logprob_values(piece), form.chunk, piece))
    assert (tokenizer.asking == {threading.get_ident()}) is alone


def test_a_long_response_is_written_beyond_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoding, encode = NotedThreads(), set[int](), msgspec.json.encode

    def noted(value: Any) -> bytes:
        encoding.add(threading.get_ident())
        return encode(value)

    whole, streamed = response(tokenizer), response(tokenizer)
    delta = scored(129)
    delta.finish = None
    streamed.chunk(Piece(0, delta, END.usage))
    tokenizer.asking.clear()
    monkeypatch.setattr("msgspec.json.encode", noted)
    last = Piece(0, scored(1), END.usage)
    assert streamed.logprob_values(last) > LONG_REPORT
    asyncio.run(streamed.closing())
    asyncio.run(whole.whole([answer_of(scored(129))]))
    assert encoding and threading.get_ident() not in tokenizer.asking | encoding

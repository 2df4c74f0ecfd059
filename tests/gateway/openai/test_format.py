import asyncio
import threading

import pytest

from gateway.delta import LONG_REPORT, Delta, Finish, Usage
from gateway.openai.form import Answer
from gateway.openai.format import ChatFormat, Head
from gateway.tokenizer import Tokenizer
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


@pytest.mark.parametrize(("choices", "alone"), [(1, True), (128, False)])
def test_many_log_probabilities_are_written_beyond_the_event_loop(choices: int, alone: bool) -> None:
    top = LONG_REPORT // 128
    answers = [Answer() for _ in range(choices)]
    for answer in answers:
        answer.add(Delta([7], "a", "", [Logprobs(-1.0, [*range(top)], [-1.0] * top)], finish=END))
    tokenizer = NotedThreads()
    head = Head("id", 0, "model", with_token_ids=False, with_usage=False, with_continuous_usage=False,
                choices_per_prompt=choices)  # fmt: skip
    asyncio.run(ChatFormat(head, tokenizer).whole(answers))
    assert (tokenizer.asking == {threading.get_ident()}) is alone

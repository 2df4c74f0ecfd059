"""What a request brings beside its tokens."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why generation ended."""

    # With a stop token, a stop string or the end of the model's answer.
    STOP = "stop"
    # With max_tokens, or the end of the context.
    LENGTH = "length"
    # The caller, or the gateway on its behalf, cancelled.
    CANCELLED = "cancelled"


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logs of the probabilities at one position, at temperature 1: the drawn token's and the highest ones."""

    logprob: float
    # The most likely tokens, best first.
    top_token_ids: list[int]
    top_logprobs: list[float]

    @property
    def top(self) -> Iterable[tuple[int, float]]:
        """The most likely token ids with their log probabilities."""
        return zip(self.top_token_ids, self.top_logprobs, strict=True)

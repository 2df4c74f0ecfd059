"""The results of a request besides its tokens."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

import msgspec


class FinishReason(StrEnum):
    """Why generation ended."""

    # A stop token, a stop string or the model ended it.
    STOP = "stop"
    # It reached max_tokens or the end of the context.
    LENGTH = "length"
    # The client, or the gateway on its behalf, cancelled it.
    CANCELLED = "cancelled"


class CachedTokens(NamedTuple):
    """Prompt tokens whose KV was found in a cache: in all, and those of them from other memories than KV pools."""

    tokens: int = 0
    from_host: int = 0
    from_stores: int = 0


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logs of the probabilities at one position, at temperature 1: of the drawn token and of the likeliest
    ones.
    """

    logprob: float
    # The most likely tokens, best first.
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]

    @property
    def top(self) -> Iterable[tuple[int, float]]:
        """The most likely token ids with their log probabilities."""
        return zip(self.top_token_ids, self.top_logprobs, strict=True)


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logs of the probabilities of a prompt's tokens except the first, each given the tokens before it, at
    temperature 1. The fields are arrays of 4-byte numbers as they lie in memory, so that no process on the way unpacks
    long prompts.
    """

    # How many of the most likely tokens are reported at each position.
    alternatives: int
    # float32, one per position.
    logprobs: bytes = b""
    # uint32, one per position: the token's rank by probability among all tokens, from 1 on.
    ranks: bytes = b""
    # uint32 and float32, `alternatives` per position, best first.
    top_token_ids: bytes = b""
    top_logprobs: bytes = b""

    @classmethod
    def joined(cls, alternatives: int, parts: "Sequence[PromptLogprobs]") -> Self:
        """The parts concatenated."""
        # A part may have fewer alternatives than were asked for if the vocabulary is that small.
        count = min((part.alternatives for part in parts), default=alternatives)
        names = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
        return cls(count, *(b"".join(getattr(part, name) for part in parts) for name in names))

    @property
    def values(self) -> int:
        """How many numbers there are; each counts as a token in the bounds of what a worker keeps."""
        return (len(self.logprobs) + len(self.ranks) + len(self.top_token_ids) + len(self.top_logprobs)) // 4

    @property
    def fits(self) -> bool:
        """Whether the fields have consistent lengths."""
        size, tops = len(self.logprobs), len(self.logprobs) * self.alternatives
        return not size % 4 and (len(self.ranks), len(self.top_token_ids), len(self.top_logprobs)) == (size, tops, tops)

    def positions(self) -> Iterator[tuple[int, Logprobs]]:
        """The rank and the log probabilities of each token from the second on."""
        own, ranks, top_ids, top = array("f"), array("I"), array("I"), array("f")
        for values, written in (
            (own, self.logprobs),
            (ranks, self.ranks),
            (top_ids, self.top_token_ids),
            (top, self.top_logprobs),
        ):
            values.frombytes(written)
        count = self.alternatives
        for index, (logprob, rank) in enumerate(zip(own, ranks, strict=True)):
            part = slice(index * count, (index + 1) * count)
            yield rank, Logprobs(logprob, top_ids[part].tolist(), top[part].tolist())

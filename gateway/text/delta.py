"""The pieces of an answer that a client reads, and how the answer ended."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from gateway.tools import ToolCallDelta
from mesh.domain.outputs import CachedTokens, FinishReason, Logprobs, PromptLogprobs

# Most log probabilities that the event loop may write for one answer or prompt; more take tens of milliseconds.
LONG_REPORT = 8192

P = ParamSpec("P")
T = TypeVar("T")


def count_values(logprobs: Iterable[Logprobs]) -> int:
    return sum(1 + len(entry.top_logprobs) for entry in logprobs)


async def write_report(values: int, write: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call `write`, on a thread if it writes more than LONG_REPORT of these `values`: the event loop can serve the
    other streams meanwhile.
    """
    if values > LONG_REPORT:
        return await asyncio.to_thread(write, *arguments, **named)
    return write(*arguments, **named)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens
    reasoning_tokens: int

    @property
    def cached_tokens(self) -> int:
        return self.cached.tokens


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    usage: Usage
    # The stop string or the token that ended the text, if one did.
    stop_string: str | None = None
    stop_token_id: int | None = None
    # Whether the answer called tools.
    called_tools: bool = False
    # Whether some tokens were accepted in place of others that the seed gives.
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt, and the log probabilities of its tokens from the second on."""

    token_ids: Sequence[int]
    logprobs: PromptLogprobs


@dataclass(slots=True)
class Delta:
    """One piece of the answer for the client: all tokens received since it last read."""

    token_ids: Sequence[int]
    content: str
    reasoning: str
    # One entry for each token if the client asked for them, otherwise empty.
    logprobs: Sequence[Logprobs] = ()
    # Pieces of tool calls.
    calls: list[ToolCallDelta] = field(default_factory=list)
    # Set in the last delta of a generation that did not fail.
    finish: Finish | None = None
    # Tokens of the answer up to the end of this delta.
    position: int = 0
    # In the first delta, if the client asked for it.
    prompt: ScoredPrompt | None = None

    def ordered_calls(self) -> tuple[list[ToolCallDelta], list[ToolCallDelta]]:
        """Pieces of a call that had begun earlier, which come before this delta's content, and all others."""
        begun = next((index for index, call in enumerate(self.calls) if call.id is not None), len(self.calls))
        return self.calls[:begun], self.calls[begun:]

    @property
    def logprob_values(self) -> int:
        """How many log probabilities its tokens have."""
        return count_values(self.logprobs)

    @property
    def empty(self) -> bool:
        """Whether the delta tells the client nothing."""
        return not (self.token_ids or self.content or self.reasoning or self.calls or self.finish)

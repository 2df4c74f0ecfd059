"""Our own tasks as a workload: the chats that `deepmesh bench --dataset tasks` sends."""

from collections.abc import Iterator

import numpy as np

from eval.workload import LONGEST_DOCUMENT, Chat, task_chats
from sim.arrivals import arrival_times
from sim.asked import Asked, with_length
from sim.device import LONGEST_OUTPUT, VOCABULARY
from sim.workload import WorkloadConfig

# Characters of text that stand for one token, about as in the usual vocabularies.
CHARACTERS = 4
# Tokens of a prompt that asks about the longest document.
LONGEST_PROMPT = LONGEST_DOCUMENT // CHARACTERS


class TaskWorkload:
    """Chats of tasks as requests. Chats that begin alike begin with the same tokens, so that they share prefixes.

    An answer is as long as the task's solution with its reasoning.
    """

    def __init__(self, config: WorkloadConfig) -> None:
        self._config = config
        self._arrivals = np.random.default_rng(config.seed)

    def __iter__(self) -> Iterator[Asked]:
        config = self._config
        assert config.arrivals is not None
        times = arrival_times(config.arrivals, config.seconds, self._arrivals)
        for seconds, chat in zip(times, task_chats(config.seed), strict=False):
            # A chat's `max_tokens` allows for a small vocabulary, with which answers have twice as many tokens as here.
            output = max(1, chat.max_tokens // 2)
            yield Asked(seconds, with_length(_tokens(chat), output), output, config.max_tokens or chat.max_tokens)


def _tokens(chat: Chat) -> list[int]:
    text = "".join(f"<{message.role}>{message.content}" for message in chat.messages)
    return [_token(text[start : start + CHARACTERS]) for start in range(0, len(text), CHARACTERS)]


def _token(piece: str) -> int:
    return LONGEST_OUTPUT + int.from_bytes(piece.encode(), "big") % (VOCABULARY - LONGEST_OUTPUT)

"""The last answers of this gateway, for the page that operators watch."""

from collections import deque
from collections.abc import Sequence

import msgspec

KEPT = 2048


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """How one generation went. Times are in milliseconds; None if the generation had no first, or no second, token."""

    # Seconds since the epoch.
    ended_at: float
    ttft_ms: float | None
    tpot_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str


class RecentAnswers:
    """A ring of the last answers. Readers name a position in the count of all answers ever added."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=KEPT)
        # Answers ever added, including those that the ring has dropped.
        self.count = 0

    def add(self, answer: Answer) -> None:
        self._answers.append(answer)
        self.count += 1

    def after(self, count: int) -> Sequence[Answer]:
        """The answers added after the first `count` ones, except those that the ring has dropped."""
        new = min(self.count - count, len(self._answers))
        return list(self._answers)[len(self._answers) - new :]

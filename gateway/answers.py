"""The last answers of this gateway, for whoever watches."""

from collections import deque
from collections.abc import Sequence

import msgspec

KEPT = 2048


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """How one generation went. Times are milliseconds; None if it had no first, or no second, token."""

    # Seconds since the epoch.
    ended_at: float
    ttft_ms: float | None
    tpot_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str


class RecentAnswers:
    """A ring, read from a number on that counts all answers."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=KEPT)
        # How many there have been.
        self.count = 0

    def add(self, answer: Answer) -> None:
        self._answers.append(answer)
        self.count += 1

    def after(self, count: int) -> Sequence[Answer]:
        """Those that came when there had been `count` already, as far as they are kept."""
        new = min(self.count - count, len(self._answers))
        return list(self._answers)[len(self._answers) - new :]

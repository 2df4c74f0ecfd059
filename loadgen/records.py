"""What is known of one request after it was sent. Times are seconds since the run's start."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RequestRecord:
    """What is set when it is made is the sender's; the client writes the rest."""

    index: int
    # When it should arrive; latencies count from here, however late the generator was.
    scheduled_s: float
    max_tokens: int
    # Which request of its session it is, from 1.
    turn: int = 1
    # When the generator woke for it.
    woken_s: float | None = None
    # Whether max_concurrency made it wait before it was sent.
    held_back: bool = False
    # Arrival of each message that carried tokens, and how many it carried.
    message_times_s: list[float] = field(default_factory=list)
    message_tokens: list[int] = field(default_factory=list)
    # When the last message came, whether or not it carried tokens; None if the request failed.
    finished_s: float | None = None
    # The endpoint's id for the request, and its counts of tokens; None as far as it does not say.
    request_id: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    # How many of these came from workers' host memory, and from KV stores.
    host_cached_tokens: int = 0
    store_cached_tokens: int = 0
    # What kind of failure, e.g. "UNAVAILABLE" or "http_429", and its message.
    error: str | None = None
    error_message: str | None = None

    def tokens(self, now_s: float, count: int) -> None:
        self.message_times_s.append(now_s)
        self.message_tokens.append(count)

    def fail(self, kind: str, message: str) -> None:
        self.error = kind
        self.error_message = message

    @property
    def completed(self) -> bool:
        return self.error is None and self.finished_s is not None

    @property
    def generated_tokens(self) -> int:
        """Output tokens as the endpoint reports them; if it does not, as they were counted."""
        return sum(self.message_tokens) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the scheduled arrival."""
        return self.message_times_s[0] - self.scheduled_s if self.message_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1); None below two tokens."""
        if self.generated_tokens < 2 or not self.message_times_s:
            return None
        return (self.message_times_s[-1] - self.message_times_s[0]) / (self.generated_tokens - 1)

    @property
    def answer_per_token_s(self) -> float | None:
        """Time of the whole answer, from the scheduled arrival, per output token; None without a token or an end."""
        if self.finished_s is None or not self.generated_tokens:
            return None
        return (self.finished_s - self.scheduled_s) / self.generated_tokens

    @property
    def inter_token_s(self) -> list[float]:
        """Gaps between successive messages with tokens."""
        return [later - earlier for earlier, later in pairwise(self.message_times_s)]

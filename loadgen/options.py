"""What one load run does: the endpoint, the arrivals, the requests, and the objectives they are judged by."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mesh.config import Config

DEFAULT_REQUESTS = 100
# Names that stand for workloads rather than for files.
TASKS, SESSIONS = Path("tasks"), Path("sessions")
# System prompts that sessions share by default; each is half of the shortest first prompt.
DEFAULT_SYSTEMS = 4
# The largest max_tokens that a request can carry.
MOST_TOKENS = 2**32 - 1
# All are drawn before the first is sent: more would take hours and the machine's memory.
MOST_REQUESTS = 10_000_000
LONGEST_PROMPT = 10_000_000
# What a search judges by unless told otherwise, and for how long it tries each rate.
SEARCH_TTFT_MS, SEARCH_TPOT_MS, SEARCH_SECONDS = 2000.0, 50.0, 60.0
# Requests of a run arrive for a month at most. A rate that would need longer is a slip.
LONGEST_RUN_S = 30 * 24 * 3600


class LoadOptions(Config):
    """Options of `deepmesh bench`. Exactly one of `url` and `grpc` names the endpoint."""

    # Base of an OpenAI API, e.g. http://127.0.0.1:8000/v1.
    url: str | None = Field(default=None, pattern="^https?://", examples=["http://127.0.0.1:8000/v1"])
    # host:port of a deepmesh gateway.
    grpc: str | None = None
    # By default the first model that the endpoint lists.
    model: str | None = None
    api_key: str | None = None
    # Which OpenAI call; "auto" sends messages to chat and everything else to completions.
    api: Literal["auto", "chat", "completions"] = "auto"

    # Mean arrivals a second; inf sends all requests at once. Of a trace: how many times as fast as recorded.
    rate: float = Field(default=1.0, gt=0)
    # How many requests (or sessions), or for how long they arrive; by default the whole dataset, or 100.
    requests: int | None = Field(default=None, ge=1, le=MOST_REQUESTS)
    duration_s: float | None = Field(default=None, gt=0)
    # Sent one after another before the clock starts, and not counted.
    warmup: int = Field(default=2, ge=0)
    # Requests in flight at once; further ones wait, and their wait counts in their time to first token.
    max_concurrency: int | None = Field(default=None, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    seed: int = Field(default=0, ge=0)

    # Tokens of a synthetic prompt, and of an answer.
    isl: int = Field(default=512, ge=1, le=LONGEST_PROMPT)
    osl: int = Field(default=128, ge=1, le=MOST_TOKENS // 2)
    # Lengths are uniform in [length x (1 - ratio), length x (1 + ratio)].
    range_ratio: float = Field(default=0.0, ge=0, lt=1)
    # Synthetic prompts begin with one of `prefixes` texts of `prefix_length` tokens (part of isl); see shared_prefixes.
    prefixes: int | None = Field(default=None, ge=0)
    prefix_length: int | None = Field(default=None, ge=0)
    # Sessions: requests of each, mean seconds between an answer and the next (exponential), tokens that each adds.
    turns: int = Field(default=4, ge=1, le=10_000)
    think_s: float = Field(default=5.0, ge=0, le=LONGEST_RUN_S)
    turn_tokens: int = Field(default=64, ge=1, le=LONGEST_PROMPT)
    # Token ids of synthetic prompts lie below this; by default what the endpoint says, or 1000.
    vocabulary_size: int | None = Field(default=None, ge=32)
    # JSON lines with "messages" or "prompt" (and "max_tokens"), plain text with one prompt a line, or a trace as
    # Mooncake publishes them. "tasks" draws chats from the tasks of eval/ without end, "sessions" synthetic sessions.
    dataset: Path | None = None
    # By default true for synthetic prompts (so that their lengths hold), false for texts of a dataset.
    ignore_eos: bool | None = None
    temperature: float = Field(default=0.0, ge=0)

    ttft_slo_ms: float | None = Field(default=None, gt=0)
    tpot_slo_ms: float | None = Field(default=None, gt=0)
    # Find the highest rate, beginning with `rate`, at which `good_share` of the requests keep these objectives. Without
    # one a search has both: the first token in 2 s, then one every 50 ms. Each rate is tried for a minute by default.
    find_rate: bool = False
    good_share: float = Field(default=0.9, gt=0, le=1)
    # The report's JSON; the plot lies next to it. By default out/load-<time>.json.
    output: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _search_has_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("find_rate"):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        if not given.keys() & {"ttft_slo_ms", "tpot_slo_ms"}:
            given |= {"ttft_slo_ms": SEARCH_TTFT_MS, "tpot_slo_ms": SEARCH_TPOT_MS}
        return {"duration_s": SEARCH_SECONDS, **given}

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if (self.url is None) == (self.grpc is None):
            raise ValueError("name one endpoint: url (http://host:port/v1) or grpc (host:port)")
        if self.requests is not None and self.find_rate:
            raise ValueError("find_rate tries each rate for duration_s: leave requests out")
        if self.requests is not None and self.duration_s is not None:
            raise ValueError("give requests or duration_s, not both")
        if self.duration_s is not None and self.rate == float("inf"):
            raise ValueError("duration_s needs a finite rate")
        if self.duration_s is not None and self.rate * self.duration_s > MOST_REQUESTS:
            raise ValueError(f"rate and duration_s make more than {MOST_REQUESTS:,} requests")
        prefixes, prefix_length = self.shared_prefixes
        if bool(prefixes) != bool(prefix_length):
            raise ValueError("shared prefixes need both prefixes and prefix_length")
        if prefix_length >= self.isl * (1 - self.range_ratio) and prefixes:
            raise ValueError("prefix_length must be shorter than the shortest prompt")
        if self.dataset == SESSIONS and self.api == "completions":
            raise ValueError("sessions are chats, which api completions cannot send")
        return self

    @property
    def reads_file(self) -> bool:
        return self.dataset not in (None, TASKS, SESSIONS)

    @property
    def shared_prefixes(self) -> tuple[int, int]:
        """How many there are, and the tokens of each. Sessions share a few system prompts unless told otherwise."""
        if self.dataset != SESSIONS:
            return self.prefixes or 0, self.prefix_length or 0
        number = DEFAULT_SYSTEMS if self.prefixes is None else self.prefixes
        shortest = int(self.isl * (1 - self.range_ratio))
        length = shortest // 2 if self.prefix_length is None else self.prefix_length
        return (number, length) if number and length else (0, 0)

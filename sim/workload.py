"""What a simulated fleet is asked: one YAML file."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from mesh.config import Config
from mesh.domain.shares import MAX_WEIGHT, MIN_WEIGHT


class LengthConfig(Config):
    """How tokens of a prompt, or of an answer, are distributed."""

    mean: float = Field(gt=0)
    """Mean tokens."""
    kind: Literal["fixed", "uniform", "exponential", "lognormal", "quantiles"] = "fixed"
    """fixed: always the mean; uniform: up to `spread` of the mean away from it; lognormal: see `spread`; quantiles: as
    measured.
    """
    spread: float = Field(default=0.5, ge=0)
    """uniform: share of the mean; lognormal: standard deviation of the logarithm."""
    quantiles: tuple[float, ...] = ()
    """quantiles: lengths that equal shares of the requests lie between, ascending."""
    least: int = Field(default=1, ge=1)
    most: int = Field(default=131_072, ge=1)
    """Bounds; what lies outside is cut off there."""

    @model_validator(mode="after")
    def _quantiles_come_with_their_kind(self) -> Self:
        if (self.kind == "quantiles") != bool(self.quantiles):
            raise ValueError("kind: quantiles and a list of quantiles go together")
        if self.quantiles and (len(self.quantiles) < 2 or list(self.quantiles) != sorted(self.quantiles)):
            raise ValueError("quantiles are at least two lengths, ascending")
        return self


class SpikeConfig(Config):
    """A time at which more requests come."""

    at: float = Field(ge=0)
    """Seconds after the start."""
    seconds: float = Field(gt=0)
    """How long it lasts."""
    factor: float = Field(gt=1)
    """How many times the rate that there would be without it."""


class ArrivalConfig(Config):
    """When requests come."""

    kind: Literal["poisson", "bursty", "steady"] = "poisson"
    """bursty: gamma distributed gaps with `burstiness`; steady: equal gaps."""
    per_second: float = Field(gt=0)
    """Mean rate."""
    burstiness: float = Field(default=4.0, gt=0)
    """Variance of the gaps, relative to a Poisson process."""
    day_seconds: float | None = Field(default=None, gt=0)
    """Length of a day: the rate follows a sine from `night` of its peak to the peak; null keeps the rate."""
    night: float = Field(default=0.25, ge=0, le=1)
    """The lowest rate, relative to the highest."""
    spikes: tuple[SpikeConfig, ...] = ()
    """Times of more requests."""


class TenantConfig(Config):
    """A tenant whose requests are part of the workload."""

    name: str
    share: float = Field(default=1.0, gt=0)
    """Share of the requests, relative to the other tenants' shares."""
    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    """Its part of a full mesh, relative to the others'."""


class WorkloadConfig(Config):
    """A workload: synthetic, or from a trace."""

    seconds: float = Field(default=300.0, gt=0)
    """How long requests come."""
    warm_up_seconds: float = Field(default=0.0, ge=0)
    """Requests that come earlier are served, and not counted."""
    cool_down_seconds: float = Field(default=0.0, ge=0)
    """Requests of the last seconds are served, and not counted: nothing comes any more while they are."""
    seed: int = Field(default=0, ge=0)
    arrivals: ArrivalConfig | None = None
    prompt: LengthConfig = LengthConfig(mean=512)
    output: LengthConfig = LengthConfig(mean=128)
    max_tokens: int | None = Field(default=None, ge=1)
    """What requests say of their longest answer; by default what they turn out to have."""
    prefixes: int = Field(default=0, ge=0)
    """Number of texts that prompts begin with, each of `prefix_tokens`; popular ones more often (Zipf)."""
    prefix_tokens: int = Field(default=0, ge=0)
    """Part of the prompt's length."""
    turns: int = Field(default=1, ge=1)
    """Requests of one session: each repeats what was said and adds a prompt."""
    think_seconds: float = Field(default=10.0, ge=0)
    """Mean pause between an answer and the next turn."""
    tenants: tuple[TenantConfig, ...] = ()
    """Each has prefixes of its own."""
    tasks: bool = False
    """Chats made of our own tasks, as `deepmesh bench --dataset tasks` sends them, in place of drawn lengths."""
    trace: Path | None = None
    """JSON lines with timestamp (ms), input_length, output_length and hash_ids (Mooncake's format), or a CSV with
    TIMESTAMP, ContextTokens and GeneratedTokens (Azure's).
    """
    speed: float = Field(default=1.0, gt=0)
    """How much faster than recorded a trace is played."""

    @model_validator(mode="after")
    def _requests_come_from_somewhere(self) -> Self:
        if (self.arrivals is None) == (self.trace is None):
            raise ValueError("give one of arrivals and trace")
        if self.tasks and self.trace is not None:
            raise ValueError("give one of tasks and trace")
        if self.prefixes and self.prefix_tokens >= self.prompt.mean:
            raise ValueError("prefix_tokens is a part of the prompt: it must be below prompt.mean")
        return self

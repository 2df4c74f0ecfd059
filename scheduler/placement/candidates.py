"""The inputs of placement, as plain data: the request, the workers, and what stores hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from mesh.blocks import BLOCK_TOKENS
from mesh.costs import CostModel
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.placement import PlacementQuery
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import TransferCounters, WorkerIdentity, WorkerLoad
from scheduler.placement.growth import NO_ANSWERS, PlacedAnswers
from scheduler.placement.prompts import JointPrompts, LastStep, prompt_step_tokens, steps_of


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A query, and what the scheduler adds to it."""

    query: PlacementQuery
    # Mean over the model's finished requests; None uses the worker's own measurement.
    mean_output_tokens: float | None = None
    # Share of the model's answers that end before they reach their limit of tokens.
    stopping: float = 1.0
    # The fraction of waiting requests that is served before this one: tenants take turns.
    ahead: float = 1.0
    # Blocks that the prompt takes, and how many of them can be reused.
    prompt_blocks: int = field(init=False)
    reusable_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_blocks", blocks(self.query.prompt_tokens))
        object.__setattr__(self, "reusable_blocks", reusable_blocks(self.query.prompt_tokens))


def reusable_blocks(prompt_tokens: int) -> int:
    """Blocks of a prompt that can be reused. The last token is always computed, since its logits give the first new
    token.
    """
    return max(0, prompt_tokens - 1) // BLOCK_TOKENS


def blocks(tokens: float) -> int:
    """Blocks that `tokens` tokens take, at least one."""
    return max(1, -int(-tokens // BLOCK_TOKENS))


class Unreported(msgspec.Struct, frozen=True, gc=False):
    """Work placed on a worker that its reported load may not include yet."""

    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0

    def __add__(self, other: "Unreported") -> "Unreported":
        return Unreported(
            self.requests + other.requests, self.prefill_tokens + other.prefill_tokens, self.blocks + other.blocks
        )

    def __sub__(self, other: "Unreported") -> "Unreported":
        return Unreported(
            self.requests - other.requests, self.prefill_tokens - other.prefill_tokens, self.blocks - other.blocks
        )


class MeasurementTimes(msgspec.Struct, frozen=True, gc=False):
    """When each measurement of a worker last changed, on the clock of `Candidates.now`."""

    prefill: float = 0.0
    step: float = 0.0
    fetch: float = 0.0
    push: float = 0.0
    disk_fetch: float = 0.0
    sparse: float = 0.0


# A measured value, the logarithm of its ratio to the constant that replaces it if it is missing, when it changed, and
# the same logarithm of what the worker measured before it served, None if nothing. Without a measurement: the constant,
# 0 and minus infinity.
Measured: TypeAlias = tuple[float, float, float, float | None]


class Measures(msgspec.Struct, frozen=True, gc=False):
    """A worker's measurements, in the form that `estimates` compares. Times are relative to the cost model's."""

    prompts: Measured
    sparse_gain: Measured
    step: Measured
    push: Measured
    fetch: Measured
    disk_fetch: Measured


class Pace(msgspec.Struct, frozen=True, gc=False):
    """The estimated speed of a worker; no field is 0."""

    # Times of exact prompts, of sparse prompts and of decode steps, relative to the cost model's.
    prompt_slowness: float
    sparse_slowness: float
    slowness: float
    push_bytes_per_second: float
    fetch_bytes_per_second: float
    disk_fetch_bytes_per_second: float


class CandidateWorker(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One live worker of the model, or one of its DP ranks, and what it holds of this request's prompt."""

    identity: WorkerIdentity
    # The rank of the worker that this is; None if it is the whole worker.
    rank: int | None = None
    # Its part of the worker's room.
    total_blocks: int
    max_requests: int
    # Why the worker takes no requests at all; None if it takes them.
    unusable: str | None = None
    # Whether its status stream is open. If the stream broke, the worker may be alive or dead.
    connected: bool = True
    load: WorkerLoad
    transfers: TransferCounters = TransferCounters()
    # When the measurements in `load` and `transfers` were made.
    measured_at: MeasurementTimes = MeasurementTimes()
    # Its `estimates.measures`, if its owner caches them; None lets `estimates.paces` compute them.
    measures: Measures | None = None
    unreported: Unreported = Unreported()
    # Requests on the worker's other ranks: a prompt here delays them too, since the ranks step together.
    others_requests: int = 0
    # Leading blocks of the prompt that the worker holds in its pool, and more after these in host memory.
    cached_blocks: int = 0
    host_blocks: int = 0
    # When it will have computed the prompts that it has, on the clock of `Candidates.now`; None if unknown.
    prompts_until: float | None = None
    # The last of the steps that compute the prompts that it has.
    last_prompt_step: LastStep = LastStep()
    # The prompts of all ranks of the worker, if it decodes with several ranks and says how they step.
    joint_prompts: JointPrompts | None = None
    # When it last reported that a step ended and another began, on that clock; None if it has not.
    step_began: float | None = None
    # Duration of its steps without prompts; None if unknown.
    quiet_step_ms: float | None = None
    # Those of its answers that this scheduler knows, because it placed them.
    answers: PlacedAnswers = NO_ANSWERS
    # When its running requests end if each reaches its token limit, on that clock, ascending. Empty if it has a free
    # place, or if this scheduler does not know all of its requests.
    ends: Sequence[float] = ()

    @property
    def requests(self) -> int:
        """Requests that it has, and those placed on it that it has not reported yet."""
        return self.load.running_requests + self.load.waiting_requests + self.unreported.requests

    @property
    def prompt_step_tokens(self) -> int:
        """The most prompt tokens of each of its next steps."""
        return prompt_step_tokens(self.load, self.identity.max_step_tokens)

    def prompts_ms(self, now: float, pace: Pace, costs: CostModel) -> float:
        """Predicted milliseconds until it has computed the prompts that it has, at this pace."""
        if self.prompts_until is not None:
            left = self.prompts_until - now
            return left * 1000 if left > 0 else 0.0
        queued = self.load.queued_prefill_tokens + self.unreported.prefill_tokens
        steps = steps_of(queued, self.prompt_step_tokens)
        return pace.prompt_slowness * (costs.prefill_ms(queued) + steps * costs.prefill_step_ms)


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Everything that a request may be placed on."""

    decode: Sequence[CandidateWorker]
    prefill: Sequence[CandidateWorker] = ()
    stores: Mapping[KvNamespace, StoreTarget] = msgspec.field(default_factory=dict)
    # Seconds on a monotonic clock.
    now: float = 0.0

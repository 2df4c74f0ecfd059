"""What placement chooses among, as plain data: the request, the workers, what stores hold, and constants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from mesh.blocks import BLOCK_TOKENS
from mesh.costs import CostModel
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import KvNamespace, WorkerLoad
from scheduler.joint_prompts import JointPrompts


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement needs to know of a request; lengths in tokens."""

    prompt_tokens: int
    max_tokens: int
    # Ids of decode and prefill workers that must not be chosen.
    avoid: frozenset[str] = frozenset()
    # Mean over the model's finished requests; None means that the worker's own measurement is used.
    mean_output_tokens: float | None = None
    # Tokens of the prompt with at least so many before them are attended to sparsely, where a worker does so; None if
    # the request is to be exact.
    sparse_from: int | None = None
    # Share of the model's answers that end before they have as many tokens as they may have.
    stopping: float = 1.0
    # Which part of those who wait are served before it: tenants are served by turns.
    ahead: float = 1.0
    # Blocks that the prompt takes, and how many of them can be reused: the last token is always computed, since its
    # logits give the first new one.
    prompt_blocks: int = field(init=False)
    reusable_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_blocks", blocks(self.prompt_tokens))
        object.__setattr__(self, "reusable_blocks", max(0, self.prompt_tokens - 1) // BLOCK_TOKENS)


def blocks(tokens: float) -> int:
    """Blocks that so many tokens take, at least one."""
    return max(1, -int(-tokens // BLOCK_TOKENS))


class Unreported(msgspec.Struct, frozen=True, gc=False):
    """Work placed on a worker that its load may not show yet."""

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
    """When each measurement of a worker last changed, by the clock of `Candidates.now`."""

    prefill: float = 0.0
    step: float = 0.0
    fetch: float = 0.0
    push: float = 0.0
    disk_fetch: float = 0.0
    sparse: float = 0.0


# A measured value, the logarithm of its ratio to the constant that stands in for it, and when it changed. Without any:
# the constant, 0 and minus infinity.
Measured: TypeAlias = tuple[float, float, float]


class Measures(msgspec.Struct, frozen=True, gc=False):
    """What a worker measured, as `estimates` compares it. Times are relative to the cost model's."""

    prompts: Measured
    sparse_gain: Measured
    step: Measured
    push: Measured
    fetch: Measured
    disk_fetch: Measured


class Pace(msgspec.Struct, frozen=True, gc=False):
    """How fast a worker is taken to be; nothing is 0."""

    # Times of its exact prompts, of its sparse prompts and of its decode steps, relative to the cost model's.
    prompt_slowness: float
    sparse_slowness: float
    slowness: float
    push_bytes_per_second: float
    fetch_bytes_per_second: float
    disk_fetch_bytes_per_second: float


class CandidateWorker(msgspec.Struct, frozen=True, gc=False):
    """One live worker of the model, or one of its DP ranks, and what it holds of this request's prompt."""

    worker_id: str
    # Why it takes no requests at all; None if it takes them.
    unusable: str | None
    context_tokens: int
    total_blocks: int
    max_requests: int
    load: WorkerLoad
    namespace: KvNamespace
    unreported: Unreported = Unreported()
    # Leading blocks of the prompt that it has.
    cached_blocks: int = 0
    # Whether its status stream is up. A worker whose stream broke may be alive or dead.
    connected: bool = True
    # Whether a decode worker computes prompts too.
    can_prefill: bool = True
    # Whether it computes sparsely what a request wants so.
    sparse: bool = False
    # Whether prefill workers can push KV to a decode worker.
    receives_kv: bool = True
    # Bytes of one block of KV, all layers.
    block_bytes: int = 0
    # KV of prompts with at least this many tokens is pushed, from it or to it, while later layers compute.
    layerwise_tokens: int = 0
    # Rates of its fetches from the memory of stores, and from their disks; None while unknown.
    fetch_bytes_per_second: float | None = None
    disk_fetch_bytes_per_second: float | None = None
    # When its measurements were made, those in `load` too.
    measured_at: MeasurementTimes = MeasurementTimes()
    # Which of the worker's ranks it is; None if it is the whole worker.
    rank: int | None = None
    # Requests on the worker's other ranks: a prompt delays them too, since the ranks step together.
    requests_beside: int = 0
    # See `WorkerIdentity`.
    worker_class: str = ""
    # When it will have computed the prompts that it has, by the clock of `Candidates.now`; None if that is not known.
    prompts_until: float | None = None
    # When it last reported that a step has ended and another has begun, by that clock; None if it has not.
    step_began: float | None = None
    # Time of its steps without prompts; None if that is not known.
    quiet_step_ms: float | None = None
    # When those that it runs end if each has as many tokens as it may have, by that clock, ascending. Empty while it
    # has a place, and if nobody here knows all of them.
    ends: Sequence[float] = ()
    # What `estimates.measures` makes of it, where its owner keeps that; None leaves it to `estimates.paces`.
    measures: Measures | None = None
    # The prompts of all of the worker's ranks, if it decodes with several and says how they step.
    joint_prompts: JointPrompts | None = None

    @property
    def requests(self) -> int:
        """Those that it has, and those placed on it that it has not reported yet."""
        return self.load.running_requests + self.load.waiting_requests + self.unreported.requests

    def prompts_ms(self, now: float, pace: Pace, costs: CostModel) -> float:
        """Predicted time until it, at this pace, will have computed the prompts that it has."""
        if self.prompts_until is not None:
            left = self.prompts_until - now
            return left * 1000 if left > 0 else 0.0
        queued = self.load.queued_prefill_tokens + self.unreported.prefill_tokens
        return pace.prompt_slowness * costs.prefill_ms(queued)


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """Everything that a request may be placed on."""

    decode: Sequence[CandidateWorker]
    prefill: Sequence[CandidateWorker] = ()
    stores: Mapping[KvNamespace, StoreTarget] = msgspec.field(default_factory=dict)
    # Seconds, by a clock that never goes back.
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementKnobs:
    """Constants of the prediction, and what stands in for a measurement while there is none."""

    # How times grow with the work, and the times themselves while a worker has not measured its own.
    costs: CostModel = field(default_factory=CostModel)
    mean_output_tokens: float = 256.0
    # Requests that may wait on a worker for a place in its batch.
    queue_requests: int = 512
    # Share of a push's time that remains after the computation if layers are pushed while later ones compute.
    layerwise_rest: float = 0.125
    # Prompt tokens that ride along in decode steps without lengthening them much.
    short_prompt_tokens: int = 64
    # Weight of the delay of running requests, relative to the delay of the placed request.
    interference: float = 1.0

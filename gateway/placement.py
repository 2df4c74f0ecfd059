"""The gateway's questions to the scheduler, and its reports to it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mesh.domain.shares import ONE_TENANT, Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget, WorkerTarget


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    # Drawn by the gateway: the request's own id may be the client's choice.
    generation_id: str
    request_id: str
    # Counted from 1.
    attempt: int
    model: str
    prompt_tokens: int
    max_tokens: int
    # Chain hashes of the prompt's full blocks, root first.
    block_hashes: Sequence[bytes]
    avoid: Collection[str]
    share: Share = ONE_TENANT
    # How the prompt's attention is to be computed; None means exactly.
    sparse: SparsePrefill | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    decode: WorkerTarget
    # None if the decode worker computes the prompt itself.
    prefill: WorkerTarget | None = None
    # None if computing is quicker than fetching.
    store: StoreTarget | None = None
    # The ranks of the workers on which the scheduler counts the request; None if it does not say.
    decode_rank: int | None = None
    prefill_rank: int | None = None


class Outcome(Enum):
    """How one attempt ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    # The worker had no room, or was draining.
    REFUSED = "refused"
    LOST = "lost"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AttemptReport:
    generation_id: str
    request_id: str
    attempt: int
    worker_id: str
    outcome: Outcome
    output_tokens: int
    cached_tokens: int
    # Milliseconds of this attempt; 0 if it did not get that far.
    time_to_first_token_ms: float
    time_per_output_token_ms: float


class Placer(Protocol):
    async def place(self, query: PlacementQuery) -> Placement:
        """Raises UnknownModel, NoWorker, NamespaceMismatch, Overloaded, ContextExceeded or SchedulerUnavailable."""
        ...

    def report(self, report: AttemptReport) -> None:
        """Report how an attempt ended; never waits."""
        ...

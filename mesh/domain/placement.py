"""What a gateway asks a scheduler about one attempt of a request, what it is answered, and how the attempt ended."""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import msgspec

from mesh.domain.shares import ONE_TENANT, Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget, WorkerTarget

# Identifies a placement: the id of its generation, and the number of the attempt.
PlacementKey: TypeAlias = tuple[str, int]


class PlacementQuery(msgspec.Struct, frozen=True):
    """Where shall this attempt go? Lengths are in tokens."""

    # Drawn by the gateway, and the same for all attempts: clients may use one request id for several requests.
    generation_id: str
    # Counted from 1.
    attempt: int
    model: str
    prompt_tokens: int
    max_tokens: int
    # Chain hashes of the prompt's full blocks, root first.
    block_hashes: Sequence[bytes] = ()
    # Ids of decode and prefill workers that must not be chosen.
    avoid: frozenset[str] = frozenset()
    share: Share = ONE_TENANT
    # How workers that offer it compute the prompt's attention; None means exactly.
    sparse: SparsePrefill | None = None
    # The request's name in logs.
    request_id: str = ""

    @property
    def key(self) -> PlacementKey:
        return self.generation_id, self.attempt


class Placement(msgspec.Struct, frozen=True):
    """The workers and the store that take an attempt."""

    decode: WorkerTarget
    # None if the decode worker computes the prompt itself.
    prefill: WorkerTarget | None = None
    # The store to ask for the part of the prompt that the computing worker lacks; None if computing is faster.
    store: StoreTarget | None = None
    # The ranks of the workers on which the scheduler counts the request; None for a worker with one rank.
    decode_rank: int | None = None
    prefill_rank: int | None = None


class AttemptOutcome(Enum):
    """How an attempt ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    # The worker had no room, or was draining.
    REFUSED = "refused"
    # The worker was lost.
    LOST = "lost"
    FAILED = "failed"


class AttemptReport(msgspec.Struct, frozen=True):
    """What a gateway tells its schedulers about an attempt that has ended."""

    generation_id: str
    attempt: int
    outcome: AttemptOutcome
    output_tokens: int
    cached_tokens: int = 0
    # Milliseconds of this attempt; 0 if it did not get that far.
    time_to_first_token_ms: float = 0.0
    time_per_output_token_ms: float = 0.0
    request_id: str = ""
    worker_id: str = ""

    @property
    def key(self) -> PlacementKey:
        return self.generation_id, self.attempt

"""The terms of one candidate: a decode worker alone, or with a prefill worker."""

from enum import Enum
from typing import TypeAlias

import msgspec

from mesh.domain.targets import StoreTarget


class Rejection(Enum):
    """Why a candidate was rejected."""

    UNUSABLE = "unusable"
    AVOIDED = "avoided"
    CONTEXT = "context"
    # No prefill worker shares the decode worker's KV namespace.
    NAMESPACE = "namespace"
    FULL = "full"
    OBJECTIVE = "objective"


# Why a candidate cannot take the request, and that in words; None and empty if it can.
Verdict: TypeAlias = tuple[Rejection | None, str]


class Terms(msgspec.Struct, frozen=True, gc=False):
    """What placing the request on this candidate means. All times are predictions."""

    # The decode worker.
    worker_id: str
    # The worker that computes the prompt; None if the decode worker does.
    prefill_worker_id: str | None
    # The store to ask for the part of the prompt that the computing worker lacks; None if computing is faster.
    store: StoreTarget | None
    # Blocks of the prompt that need not be computed, and how many of those the decode worker holds.
    cached_blocks: int
    held_blocks: int
    uncached_tokens: int
    ttft_ms: float
    tpot_ms: float
    # How many requests like this one, at mean output length, the decode worker still has room for.
    slots_left: int
    # Milliseconds until one of its requests ends.
    drain_ms: float
    # Milliseconds to the last token, plus the weighted delay of other requests; placement minimises it.
    total_ms: float
    # Requests of the decode worker, including those placed on it that it has not reported yet.
    requests: int
    # How many of the candidate's workers have a broken status stream: they may be alive or dead.
    disconnected: int
    rejection: Rejection | None = None
    # The rejection in words; empty if there is none.
    rejected: str = ""
    # Blocks after the held ones that the decode worker reads from its host memory.
    host_blocks: int = 0
    # The ranks of the decode worker and the prefill worker; None if a worker has only one.
    rank: int | None = None
    prefill_rank: int | None = None
    # Milliseconds of the prompt's fetch and computation, without any wait.
    prompt_ms: float = 0.0
    # How many of the uncached tokens attend sparsely.
    sparse_tokens: int = 0
    # Milliseconds until the decode worker begins a step in which the request has a place. If it computes the prompt
    # itself, prompts must also begin in that step.
    wait_ms: float = 0.0

    @property
    def name(self) -> str:
        """The candidate's workers, in the order in which the request reaches them."""
        decode = _named(self.worker_id, self.rank)
        if self.prefill_worker_id is None:
            return decode
        return f"{_named(self.prefill_worker_id, self.prefill_rank)} -> {decode}"

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return (self.worker_id,) if self.prefill_worker_id is None else (self.worker_id, self.prefill_worker_id)

    def preference(self) -> tuple[bool, int, float, int, int, str, str]:
        """Sort key, best first: connected workers, then the least total time, then the most cached blocks, the fewest
        requests, and the names."""
        return (
            self.rejection is not None,
            self.disconnected,
            self.total_ms,
            -self.cached_blocks,
            self.requests,
            self.worker_id,
            self.prefill_worker_id or "",
        )


def _named(worker_id: str, rank: int | None) -> str:
    return worker_id if rank is None else f"{worker_id} rank {rank}"

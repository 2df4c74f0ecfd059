"""What placement found for one candidate: a decode worker alone, or with a prefill worker."""

from enum import Enum

import msgspec

from mesh.domain.targets import StoreTarget


class Rejection(Enum):
    """Why a candidate was not taken."""

    UNUSABLE = "unusable"
    AVOIDED = "avoided"
    CONTEXT = "context"
    # No prefill worker's KV means what the decode worker's does.
    NAMESPACE = "namespace"
    FULL = "full"
    OBJECTIVE = "objective"


class Terms(msgspec.Struct, frozen=True):
    """Times are predictions."""

    # Decodes.
    worker_id: str
    # Computes the prompt; None where the decode worker does.
    prefill_worker_id: str | None
    # Asked for the part of the prompt that whoever computes it lacks; None where recomputing is faster.
    store: StoreTarget | None
    # Blocks of the prompt that nobody computes, and those of them that the decode worker has.
    cached_blocks: int
    held_blocks: int
    uncached_tokens: int
    ttft_ms: float
    tpot_ms: float
    # Requests like this one, at mean output length, that the decode worker still has room for.
    slots_left: int
    # Until one of its requests ends.
    drain_ms: float
    # To the last token, and what others lose by it: what is minimised.
    total_ms: float
    # Requests that the decode worker has, and was given.
    requests: int
    # Of its workers, those whose status stream is broken: they may be well, and may be dead.
    disconnected: int
    rejection: Rejection | None = None
    # The rejection in words; empty where there is none.
    rejected: str = ""

    @property
    def name(self) -> str:
        """The workers, in the order in which the request meets them."""
        return self.worker_id if self.prefill_worker_id is None else f"{self.prefill_worker_id} -> {self.worker_id}"

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return (self.worker_id,) if self.prefill_worker_id is None else (self.worker_id, self.prefill_worker_id)

    def preference(self) -> tuple[bool, int, float, int, int, str]:
        """Sorts the best first: the cheapest of those connected, of equal ones the one with more cached, then the
        emptier, then the first by name."""
        return (
            self.rejection is not None,
            self.disconnected,
            self.total_ms,
            -self.cached_blocks,
            self.requests,
            self.name,
        )

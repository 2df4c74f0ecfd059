"""A request in token ids, as it travels from the gateway to the engine."""

from collections.abc import Sequence

import msgspec

from mesh.domain.constraints import Constraint
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.shares import ONE_TENANT, Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget, WorkerTarget


class TokenRequest(msgspec.Struct, frozen=True):
    """What to generate."""

    # Used in logs and traces only.
    request_id: str
    # The prompt and, if the request was placed again, the answer's tokens that the gateway has received.
    token_ids: Sequence[int]
    sampling: Sampling
    stop: StopConditions
    # Root of the chain of block hashes: tenants with different salts share no blocks.
    cache_salt: bytes = b""
    # Counts the placements of the request.
    attempt: int = 0
    # How many of token_ids belong to the client's prompt; None if all do.
    prompt_tokens: int | None = None
    # The constraint on the answer; None allows everything.
    constraint: Constraint | None = None
    # The tenant's claim, which decides the order among requests.
    share: Share = ONE_TENANT
    # The calling span (`mesh.observe.tracing`); None outside traces.
    traceparent: str | None = None
    # How the attention of a long prompt is computed; None if exactly.
    sparse: SparsePrefill | None = None


class StreamTag(msgspec.Struct, frozen=True):
    """Names a stream that its client may resume through another gateway."""

    stream_id: bytes
    # Counts the stream's owners: of two logs, the one with the later owner is right.
    epoch: int
    # The gateways' own record of how the answer is read. Workers store it without reading it.
    context: bytes


class Submission(msgspec.Struct, frozen=True):
    """A request for a decode worker."""

    # Chosen by the gateway, used once.
    stream_id: int
    request: TokenRequest
    # Milliseconds after receipt at which the worker gives up; None if there is no deadline.
    deadline_ms: int | None = None
    # The worker that computes the prompt; None if the decode worker does.
    prefill: WorkerTarget | None = None
    # A store that may hold the prompt's prefix. The worker that computes the prompt asks it.
    store: StoreTarget | None = None
    # None if the stream cannot be resumed.
    stream: StreamTag | None = None
    # The ranks of the decode worker and the prefill worker on which the scheduler counts the request; None if it does
    # not say. The workers may choose others, since they may know better.
    rank: int | None = None
    prefill_rank: int | None = None

    @property
    def own_prefill_tokens(self) -> int:
        """Prompt tokens that the decode worker computes."""
        return len(self.request.token_ids) if self.prefill is None else 0

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

    # For logs and traces.
    request_id: str
    # The prompt and, after a re-placement, the tokens that were delivered.
    token_ids: Sequence[int]
    sampling: Sampling
    stop: StopConditions
    # Root of the chain of block hashes: tenants with different salts share no blocks.
    cache_salt: bytes = b""
    # Counts the placements of the request.
    attempt: int = 0
    # How many of token_ids are the client's prompt; None if all are.
    prompt_tokens: int | None = None
    # What the answer must be; None allows everything.
    constraint: Constraint | None = None
    # Whose it is.
    share: Share = ONE_TENANT
    # The span that asks for it (`mesh.tracing`); None outside traces.
    traceparent: str | None = None
    # How the attention of a long prompt is computed; None if exactly.
    sparse: SparsePrefill | None = None


class StreamTag(msgspec.Struct, frozen=True):
    """Names a stream that its client may go on with through another gateway."""

    stream_id: bytes
    # Counts its owners: of two logs that of the later one is right.
    epoch: int
    # The gateways': how the answer is read. Workers keep it unread.
    context: bytes


class Submission(msgspec.Struct, frozen=True):
    """A request for a decode worker."""

    # Chosen by the gateway, used once.
    stream_id: int
    request: TokenRequest
    # Milliseconds from receipt after which the worker gives up; None if there is no deadline.
    deadline_ms: int | None = None
    # Where the prompt is computed; None if the decode worker does it.
    prefill: WorkerTarget | None = None
    # A store worth asking for the prompt's prefix; whoever computes the prompt asks it.
    store: StoreTarget | None = None
    # None if nobody will go on with it.
    stream: StreamTag | None = None
    # The ranks of the decode and of the prefill worker on which the scheduler counts it; None if it does not say. The
    # workers may know better.
    rank: int | None = None
    prefill_rank: int | None = None

    @property
    def own_prefill_tokens(self) -> int:
        """Prompt tokens that the decode worker computes."""
        return len(self.request.token_ids) if self.prefill is None else 0

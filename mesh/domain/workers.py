"""What a worker reports: its identity, its load, and its transfers.

These are msgspec Structs because they also travel in the frames between a service and its rank.
"""

from collections.abc import Iterable
from enum import Enum

import msgspec

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import WorkerTarget

# Ranks that a worker has at most. Bit n of the mask that says who holds a block stands for rank n's KV pool, and bit
# MAX_RANKS + n for its host memory.
MAX_RANKS = 64
POOL_BITS = (1 << MAX_RANKS) - 1


class WorkerState(Enum):
    SERVING = "serving"
    # Finishes its requests and takes no new ones.
    DRAINING = "draining"
    # Makes no progress and takes no new requests: either it recovers soon, or its service ends it.
    STALLED = "stalled"


class WorkerRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class PromptPace(msgspec.Struct, frozen=True):
    """How fast prompt tokens of one kind are computed: measured and smoothed."""

    tokens_per_second: float
    # Mean number of tokens before each computed token: attention takes longer the more there are.
    context_tokens: float = 0.0
    # Mean number of these tokens in a step that computes no others, i.e. over how many tokens the time is spread that
    # such a step takes whatever it computes. None while unknown.
    step_tokens: float | None = None


class WorkerSpeed(msgspec.Struct, frozen=True):
    """How fast each rank of a worker was before it served its first request."""

    # Milliseconds that a step takes for each token of a request, with this many requests and no prompts.
    decode_step_ms: float
    decode_step_requests: float
    # Prompts without any requests that decode, with exact attention.
    prompts: PromptPace


class WorkerIdentity(msgspec.Struct, frozen=True):
    """Who a worker is. Fixed for the lifetime of its process."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    # host:port of its gRPC services.
    endpoint: str
    model: str
    kv_namespace: KvNamespace
    context_tokens: int
    total_blocks: int
    max_requests: int
    can_prefill: bool
    # Token ids must be below this.
    vocabulary_size: int
    # Size of one block of KV over all layers.
    block_bytes: int
    # The worker's hardware and how the model is divided on it. Workers of one class count as equally fast until they
    # have measured themselves.
    worker_class: str
    # Most tokens that each of its ranks computes in a step.
    max_step_tokens: int
    # Whether prefill workers can push KV to this worker, if it is a decode worker.
    receives_kv: bool = True
    # Prompts of at least this many tokens are pushed while later layers are computed, if the other worker agrees; None
    # if this worker moves no KV.
    layerwise_tokens: int | None = None
    # The largest segment of KV that suits it (`TransferAgent.segment_bytes`); None if it moves no KV.
    slot_bytes: int | None = None
    # DP ranks: groups of the worker's processes that each batch their own requests. Each has an equal part of
    # `total_blocks` and of `max_requests`, and each request lies on one rank.
    ranks: int = 1
    # How it computes the attention of long prompts, for requests that ask for sparse prefill or leave the choice to it;
    # None if exactly.
    sparse_prefill: SparsePrefill | None = None
    # If the worker has several ranks and some rank decodes: the most steps that a prompt waits for prompts of other
    # ranks.
    prompt_wait_steps: int = 0
    # Least size, in tokens, of a chunk that all its ranks compute together; such prompts wait for no others. None if
    # they never do.
    divided_tokens: int | None = None
    # What placement takes for its speed while it has not served for a while; None if it was not measured.
    speed: WorkerSpeed | None = None

    @property
    def first_rate(self) -> float | None:
        """Prompt tokens per second of all its ranks before it served; None if that was not measured."""
        return None if self.speed is None else self.ranks * self.speed.prompts.tokens_per_second

    @property
    def target(self) -> WorkerTarget:
        """The worker, as a placement names it."""
        return WorkerTarget(
            self.worker_id, self.incarnation, self.endpoint, self.slot_bytes, self.kv_namespace.draft_layers
        )


def unreadable_kv(workers: Iterable[WorkerIdentity]) -> dict[str, str]:
    """Prefill workers whose KV no decode worker can take, by id, with the reason. No prompt is placed on them.

    Prefill workers of a model without any decode worker are not included: one may still come.
    """
    workers = list(workers)
    prefills = [worker for worker in workers if worker.role is WorkerRole.PREFILL]
    # For each model, the KV namespaces that its decode workers take.
    read: dict[str, set[KvNamespace]] = {}
    for worker in workers:
        if worker.role is WorkerRole.DECODE:
            read.setdefault(worker.model, set()).update([worker.kv_namespace] if worker.receives_kv else [])
    return {
        worker.worker_id: _why_unreadable(worker.kv_namespace, read[worker.model])
        for worker in prefills
        if worker.model in read and not any(worker.kv_namespace.shares_base(other) for other in read[worker.model])
    }


def _why_unreadable(namespace: KvNamespace, read: Iterable[KvNamespace]) -> str:
    other = next(iter(read), None)
    return "they receive no KV" if other is None else namespace.differences(other)


class HostTierStatus(msgspec.Struct, frozen=True):
    """A worker's KV in host memory: blocks that its pool evicted."""

    total_blocks: int
    used_blocks: int
    # Blocks copied since the start: from the pool, and back to it.
    written_blocks: int = 0
    read_blocks: int = 0
    # Smoothed rate of copies back to the pool; None while unknown.
    read_bytes_per_second: float | None = None


class WorkerLoad(msgspec.Struct, frozen=True):
    """How loaded a worker is after one engine step. Rates and means are smoothed, and None while unknown."""

    running_requests: int = 0
    waiting_requests: int = 0
    # Prompt tokens accepted but not computed yet.
    queued_prefill_tokens: int = 0
    # Blocks that no live request holds; their cached content may still be reused.
    free_blocks: int = 0
    # Counts exact and sparse prompts together.
    prefill_tokens_per_second: float | None = None
    # Time per token of a request: the duration of a step without prompts (of the first step while there is none) or,
    # with drafts, the share of it that each token takes, plus what prompts add in the long run.
    decode_step_ms: float | None = None
    mean_output_tokens: float | None = None
    # Mean number of requests that decoded in the steps without prompts that decode_step_ms measures.
    decode_step_requests: float | None = None
    # Rate of those pushes that began only after the whole prompt was computed.
    push_bytes_per_second: float | None = None
    # If a worker's experts move: (largest - mean) / mean of its ranks' load of routed experts, in the layer where it is
    # largest, and the number of experts copied to another rank's slot since the start.
    expert_imbalance: float | None = None
    experts_moved: int = 0
    # Paces of prompt tokens with exact attention, and of those with sparse attention.
    exact_prompts: PromptPace | None = None
    sparse_prompts: PromptPace | None = None
    # How many of `queued_prefill_tokens` will attend sparsely.
    queued_sparse_tokens: int = 0
    # Free blocks that it takes to admit all `waiting_requests`.
    waiting_blocks: int = 0
    # The most prompt tokens of a step in which requests decode; None if only max_step_tokens bounds them.
    even_step_tokens: int | None = None
    # None if the worker keeps no blocks in host memory.
    host_tier: HostTierStatus | None = None

    @property
    def exact_pace(self) -> PromptPace | None:
        """The pace of exact prompts; that of sparse ones if no exact prompt was measured, None if none was at all."""
        return self.exact_prompts or self.sparse_prompts


class TransferCounters(msgspec.Struct, frozen=True):
    """KV transfers of one process: totals since its start, and the transfers that are open now."""

    open_landings: int = 0
    open_pushes: int = 0
    open_fetches: int = 0
    total_slots: int = 0
    free_slots: int = 0
    quarantined_slots: int = 0
    # Keyed by UCX transport, e.g. {"tcp": 1024}.
    received_bytes: dict[str, int] = {}
    sent_bytes: dict[str, int] = {}
    # Counts by reason: bad MAC, unknown or replayed ticket, wrong size, wrong checksum, and so on.
    refused: dict[str, int] = {}
    fetches: int = 0
    fetched_blocks: int = 0
    # Smoothed rates of fetches from stores' memory and from their disks; None while unknown.
    fetch_bytes_per_second: float | None = None
    disk_fetch_bytes_per_second: float | None = None
    # Received over TCP from this host, although memory would do; by the sender's container. Not sent to the scheduler.
    local_tcp_bytes: dict[str, int] = {}


class RankStatus(msgspec.Struct, frozen=True):
    """The report of one DP rank of a worker."""

    load: WorkerLoad
    transfers: TransferCounters
    # Content-addressed blocks that the rank holds.
    cached_blocks: int

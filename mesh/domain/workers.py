"""What a worker reports: who it is, what its KV means, how loaded it is, what it transferred.

Structs of msgspec because they travel in the frames between a service and its rank too.
"""

from collections.abc import Iterable
from enum import Enum

import msgspec

from mesh.blocks import BLOCK_TOKENS
from mesh.domain.sparse_prefill import SparsePrefill


class WorkerState(Enum):
    SERVING = "serving"
    # Finishes what it has, takes nothing new.
    DRAINING = "draining"
    # Makes no progress, and takes nothing new: it goes on soon, or its service ends it.
    STALLED = "stalled"


class WorkerRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class KvNamespace(msgspec.Struct, frozen=True, cache_hash=True):
    """What cached KV bytes mean: of a block's base layers, and of the draft layers behind them, if there are any.

    Base layers may move between workers of one `base`; draft layers only if there are equally many of them too.
    """

    # Digest of the weights that made the KV.
    weights_fingerprint: str
    dtype: str
    # All, those of drafts included.
    layers: int
    layout: str
    scale: float = 1.0
    block_tokens: int = BLOCK_TOKENS
    # The last of `layers`, which only workers with drafts have and need.
    draft_layers: int = 0

    @property
    def base(self) -> "KvNamespace":
        """The base layers alone."""
        return msgspec.structs.replace(self, layers=self.layers - self.draft_layers, draft_layers=0)

    def provides(self, other: "KvNamespace") -> bool:
        """Whether blocks of this namespace hold what those of the other do: as their first layers, if it has fewer."""
        return other.draft_layers in (0, self.draft_layers) and self.shares_base(other)

    def shares_base(self, other: "KvNamespace") -> bool:
        """Whether the base layers of both mean the same, so that KV may move between their workers."""
        return self == other or self.base == other.base

    def differences(self, other: "KvNamespace") -> str:
        """In what their base layers differ, in words; empty if KV may move between their workers."""
        ours, theirs = msgspec.structs.asdict(self.base), msgspec.structs.asdict(other.base)
        return ", ".join(
            f"{field} {value} against {theirs[field]}" for field, value in ours.items() if value != theirs[field]
        )


class WorkerIdentity(msgspec.Struct, frozen=True):
    """Who a worker is. Fixed while its process lives."""

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
    # It takes token ids below this; None if it does not say.
    vocabulary_size: int | None = None
    # One block of KV, all layers; None if it does not say.
    block_bytes: int | None = None
    # Whether prefill workers can push KV to it, if it is a decode worker.
    receives_kv: bool = True
    # Prompts of at least so many tokens are pushed while later layers are computed, if the other worker agrees; None if
    # this one moves no KV.
    layerwise_tokens: int | None = None
    # The largest segment of KV that it sends or receives; None if it moves no KV.
    slot_bytes: int | None = None
    # DP ranks: groups of its processes that batch requests each for itself. Each has an equal part of `total_blocks`
    # and of `max_requests`, and a request lies on one.
    ranks: int = 1
    # What it computes with, and how it is divided; empty if it does not say. Workers of one class are taken to be
    # equally fast until they have measured themselves.
    worker_class: str = ""
    # How it computes the attention of long prompts, of requests that leave the choice to it or ask for it; None if
    # exactly.
    sparse_prefill: SparsePrefill | None = None
    # The most tokens that each of its ranks computes in a step; None if it does not say.
    max_step_tokens: int | None = None
    # If it has several ranks: for how many steps a prompt waits at most for prompts of the others, while some rank
    # decodes.
    prompt_wait_steps: int = 0
    # Tokens of a chunk that all its ranks compute together, at least: such prompts wait for no others. None: they do so
    # with none.
    divided_tokens: int | None = None


def unreadable_kv(workers: Iterable[WorkerIdentity]) -> dict[str, str]:
    """Prefill workers whose KV none of the decode workers can take, by id, and why: prompts are placed on none of them.

    Where a model has no decode worker at all its prefill workers are not among them: others may come.
    """
    workers = list(workers)
    prefills = [worker for worker in workers if worker.role is WorkerRole.PREFILL]
    # By model: the namespaces of the KV that its decode workers take.
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


class PromptPace(msgspec.Struct, frozen=True):
    """How fast prompt tokens of one kind are computed: measured, smoothed."""

    tokens_per_second: float
    # Mean number of tokens before each of them: attention takes longer the more there are.
    context_tokens: float = 0.0


class WorkerLoad(msgspec.Struct, frozen=True):
    """How loaded a worker is, as of one engine step. Rates and means are smoothed, and None while unknown."""

    running_requests: int = 0
    waiting_requests: int = 0
    # Prompt tokens accepted and not yet computed.
    queued_prefill_tokens: int = 0
    # Blocks that no live request holds; cached content in them may still be reused.
    free_blocks: int = 0
    # Exact and sparse prompts count together.
    prefill_tokens_per_second: float | None = None
    # Time of one token of a request: of a step, or with drafts of the share of a step that each token takes.
    decode_step_ms: float | None = None
    mean_output_tokens: float | None = None
    # Requests that decoded in the steps behind decode_step_ms.
    decode_step_requests: float | None = None
    # Rate of pushes that began when the whole prompt was computed.
    push_bytes_per_second: float | None = None
    # If a worker's experts move: (largest - mean) / mean of what its ranks have to do for routed experts, in the layer
    # where it is largest, and experts that were copied to another rank's slot since the start.
    expert_imbalance: float | None = None
    experts_moved: int = 0
    # The paces of prompt tokens whose attention is exact, and of those whose attention is sparse.
    exact_prompts: PromptPace | None = None
    sparse_prompts: PromptPace | None = None
    # How many of `queued_prefill_tokens` will be attended to sparsely.
    queued_sparse_tokens: int = 0

    @property
    def exact_pace(self) -> PromptPace | None:
        """The pace of exact prompts, as far as it is known: what was measured of others where no exact one was.

        Workers of version 0.1 do not tell them apart.
        """
        if self.exact_prompts is not None or self.sparse_prompts is not None:
            return self.exact_prompts or self.sparse_prompts
        return PromptPace(self.prefill_tokens_per_second) if self.prefill_tokens_per_second else None


class TransferCounters(msgspec.Struct, frozen=True):
    """KV transfers of one process: totals since its start, and what is open now."""

    open_landings: int = 0
    open_pushes: int = 0
    open_fetches: int = 0
    total_slots: int = 0
    free_slots: int = 0
    quarantined_slots: int = 0
    # By UCX transport, e.g. {"tcp": 1024}.
    received_bytes: dict[str, int] = {}
    sent_bytes: dict[str, int] = {}
    # Bad MAC, unknown or replayed ticket, wrong size, wrong checksum...: by reason.
    refused: dict[str, int] = {}
    fetches: int = 0
    fetched_blocks: int = 0
    # Smoothed, of fetches from the memory of stores, and from their disks; None while unknown.
    fetch_bytes_per_second: float | None = None
    disk_fetch_bytes_per_second: float | None = None


class RankStatus(msgspec.Struct, frozen=True):
    """What one DP rank of a worker reports."""

    load: WorkerLoad
    transfers: TransferCounters
    # Content-addressed blocks that it holds.
    cached_blocks: int

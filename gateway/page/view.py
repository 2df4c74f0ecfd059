"""The mesh as the page shows it: plain data, renewed once a second while someone looks at it."""

import msgspec


class Moves(msgspec.Struct, frozen=True):
    """KV transfers of one process: bytes since its start, and transfers that are open now."""

    received_bytes: int
    sent_bytes: int
    # UCX transports that carried any of the bytes.
    transports: list[str]
    open: int
    free_slots: int
    total_slots: int
    fetched_blocks: int


class LoadView(msgspec.Struct, frozen=True):
    """The load of a worker, or of one of its DP ranks: each rank batches its own requests."""

    running: int
    waiting: int
    max_requests: int
    queued_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    cached_blocks: int


class WorkerView(msgspec.Struct, frozen=True):
    worker_id: str
    incarnation: str
    role: str
    model: str
    state: str
    # Whether the worker has stopped reporting although its lease has not run out yet.
    silent: bool
    # For a prefill worker, why no decode worker can read its KV; empty otherwise.
    kv_unreadable: str
    lease_ms: int
    # All ranks together.
    load: LoadView
    # Measured; 0 while unknown.
    prefill_tokens_per_second: float
    decode_step_ms: float
    moves: Moves
    # One entry per rank, in order; empty if the worker has one rank.
    ranks: list[LoadView]


class TierView(msgspec.Struct, frozen=True):
    name: str
    used_blocks: int
    total_blocks: int
    block_bytes: int


class StoreView(msgspec.Struct, frozen=True):
    # Empty while the store does not answer.
    store_id: str
    endpoint: str
    tiers: list[TierView]
    lookups: int
    hits: int
    attached_workers: int
    moves: Moves


class DecisionView(msgspec.Struct, frozen=True):
    # Seconds since the epoch.
    time: float
    request_id: str
    attempt: int
    # Empty if the request was refused.
    worker_id: str
    # None if the worker has one rank.
    rank: int | None
    # Empty if the decode worker computes the prompt, or if no store is asked, respectively.
    prefill_worker_id: str
    store_id: str
    reason: str
    # Empty until the request has ended.
    outcome: str
    # The candidates that were not taken, and why.
    rejected: list[str]


class MeshView(msgspec.Struct, frozen=True):
    time: float
    # Why the scheduler does not answer; empty while it does.
    problem: str
    # Live generations of this gateway, and tokens that it has received since its start.
    live: int
    received_tokens: int
    keys: bool
    workers: list[WorkerView]
    stores: list[StoreView]
    decisions: list[DecisionView]

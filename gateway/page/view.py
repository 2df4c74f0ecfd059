"""The mesh as the page shows it: plain data, made once a second while somebody looks."""

import msgspec


class Moves(msgspec.Struct, frozen=True):
    """KV transfers of one process: bytes since its start, and what is open now."""

    received_bytes: int
    sent_bytes: int
    # Names of UCX transports that carried any.
    transports: list[str]
    open: int
    free_slots: int
    total_slots: int
    fetched_blocks: int


class LoadView(msgspec.Struct, frozen=True):
    """What a worker has to do, or one of its DP ranks, which batches requests of its own."""

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
    # Nothing is heard of it any more, and its lease has not run out yet.
    silent: bool
    # Why no decode worker can read its KV, if it is a prefill worker; empty otherwise.
    kv_unreadable: str
    lease_ms: int
    # All ranks together.
    load: LoadView
    # Measured; 0 while unknown.
    prefill_tokens_per_second: float
    decode_step_ms: float
    moves: Moves
    # In order; none if the worker has one.
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
    # None if the worker has one.
    rank: int | None
    # Empty if the decode worker computes the prompt, or asks no store.
    prefill_worker_id: str
    store_id: str
    reason: str
    # Empty until the request has ended.
    outcome: str
    # Those that were not taken, and why.
    rejected: list[str]


class MeshView(msgspec.Struct, frozen=True):
    time: float
    # Why the scheduler does not answer; empty while it does.
    problem: str
    # Generations that this gateway has live, and tokens that it has received since its start.
    live: int
    received_tokens: int
    keys: bool
    workers: list[WorkerView]
    stores: list[StoreView]
    decisions: list[DecisionView]

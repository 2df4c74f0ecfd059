"""The workers and stores that a placement names."""

import msgspec


class WorkerTarget(msgspec.Struct, frozen=True):
    """A worker, as a placement names it."""

    worker_id: str
    # Random; another one at every start of the worker.
    incarnation: str
    # host:port of its gRPC services.
    endpoint: str
    # The largest segment of KV that the worker sends; None if it sends none.
    slot_bytes: int | None = None
    # The number of draft layers in its KV.
    draft_layers: int = 0


class StoreTarget(msgspec.Struct, frozen=True, array_like=True):
    """A KV store that may hold a prompt's first blocks."""

    store_id: str
    # How many leading blocks of the prompt the store probably holds.
    blocks: int
    # How many of these, the last ones, it holds only on its disk.
    disk_blocks: int = 0

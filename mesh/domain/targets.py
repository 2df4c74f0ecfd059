"""The workers and stores that a placement names."""

import msgspec


class WorkerTarget(msgspec.Struct, frozen=True):
    """A worker, as a placement names it."""

    worker_id: str
    # Changes at every start of the worker.
    incarnation: str
    # host:port of its gRPC services.
    endpoint: str
    # The largest segment of KV that it sends; None if it sends none.
    slot_bytes: int | None = None
    # The draft layers of its KV; None if it does not say.
    draft_layers: int | None = None


class StoreTarget(msgspec.Struct, frozen=True, array_like=True):
    """A KV store that is worth asking for a prompt's first blocks."""

    store_id: str
    # How many leading blocks of the prompt it is thought to hold.
    blocks: int
    # How many of them, the last ones, it has on its disk alone.
    disk_blocks: int = 0

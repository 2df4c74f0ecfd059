"""The right to push KV into one landing, and what travels with the bytes: plain data for frames, protos and UCX."""

import msgspec

from mesh.domain.kv_identity import KvNamespace
from transfer.origin import Origin
from transfer.shared_memory import MemoryHandle


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes in a landing: `layer_count` layers of `block_count` blocks, layer-major on the wire."""

    index: int
    # The receiving worker's rank that holds the blocks, and that rank's UCX address.
    destination_rank: int
    worker_address: bytes
    first_layer: int
    layer_count: int
    # Counted among the blocks of the landing, which are those that the receiver does not hold yet.
    first_block: int
    block_count: int
    size_bytes: int


class Ticket(msgspec.Struct, frozen=True):
    """The right to push into one landing, once. Carried only in authenticated calls.

    Segment i is sent to its address with the tag `tag` + 1 + i. Its checksum is sent there with `tag`, sealed with
    `secret`.
    """

    # 16 random bytes that identify the transfer.
    transfer_id: bytes
    # How often the request was placed again.
    attempt: int
    # 32 unguessable bytes: the key of the checksums, and of their seals.
    secret: bytes
    tag: int
    # Counted from the moment at which the receiver made the ticket.
    deadline_ms: int
    namespace: KvNamespace
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


class BlockMac(msgspec.Struct, frozen=True, array_like=True):
    """MACs of one block in some of its layers, and what they were made with: see `block_macs`."""

    # Id of the worker that computed the block.
    writer: str
    # Random salt of the push that brought the block to the store.
    salt: bytes
    # One tag for each layer, in order.
    tags: bytes
    # Identifies the secret; empty if the sender is a worker or store of the previous version.
    key_id: bytes = b""


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """What the sender announces for each segment."""

    segment: int
    size_bytes: int
    # The receiver copies to live blocks only bytes with this checksum. Empty for `sources`, of which nothing is hashed:
    # both processes read the same memory.
    checksum: bytes = b""
    # UCX transport that the segment used; only the sender's endpoint knows it.
    transport: str = ""
    # MACs of the segment's blocks, if they go to or come from a store; empty between workers.
    macs: tuple[BlockMac | None, ...] = ()
    # Where the sender runs; None if it was told which transports to use.
    origin: Origin | None = None
    # The blocks of the sender's memory, if the segment is read there.
    sources: tuple[int, ...] = ()


class SlabHandle(msgspec.Struct, frozen=True):
    """With which workers of a store's host map the store's memory: [blocks, layers] pieces."""

    memory: MemoryHandle
    layers: int
    blocks: int
    piece_bytes: int


class StoreSession(msgspec.Struct, frozen=True):
    """A worker's attachment to one KV store."""

    store_id: str
    epoch: str
    worker_address: bytes
    session_id: int
    # 32 bytes; seals the UCX messages of both sides.
    session_key: bytes
    namespace: KvNamespace
    # The store's memory; None if the store does not offer it.
    slab: SlabHandle | None = None

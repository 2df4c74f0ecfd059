"""The right to push KV into one landing, and what travels beside the bytes: plain data for frames, protos and UCX."""

import msgspec

from mesh.domain.workers import KvNamespace


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes in a landing: `layer_count` layers of `block_count` blocks, layer-major on the wire."""

    index: int
    # The rank of the receiving worker that holds the blocks, and that rank's UCX address.
    destination_rank: int
    worker_address: bytes
    first_layer: int
    layer_count: int
    # Counted among the blocks of the landing: those that the receiver does not hold yet.
    first_block: int
    block_count: int
    size_bytes: int


class Ticket(msgspec.Struct, frozen=True):
    """The right to push into one landing, once. Carried only in authenticated calls.

    Segment i goes to its address with the tag `tag` + 1 + i. Its checksum goes there with `tag`, sealed with `secret`.
    """

    # 16 random bytes; names the transfer.
    transfer_id: bytes
    # How often the request was placed again.
    attempt: int
    # 32 unguessable bytes; keys the checksums, and seals them.
    secret: bytes
    tag: int
    # Counted from the moment that the receiver made the ticket.
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
    # Random, of the push that brought the block to the store.
    salt: bytes
    # One tag for each layer, in order.
    tags: bytes
    # Tells under which secret; empty from workers, and stores, of the version before.
    key_id: bytes = b""


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """What the sender announces for each segment. The receiver copies to live blocks only bytes with this checksum."""

    segment: int
    size_bytes: int
    checksum: bytes
    # UCX transport that the segment used: only the sender's endpoint knows it.
    transport: str
    # Those of its blocks, on their way to a store or from one; empty between workers.
    macs: tuple[BlockMac | None, ...] = ()


class StoreSession(msgspec.Struct, frozen=True):
    """A worker's attachment to one KV store."""

    store_id: str
    epoch: str
    worker_address: bytes
    session_id: int
    # 32 bytes; seals the UCX messages of both.
    session_key: bytes
    namespace: KvNamespace

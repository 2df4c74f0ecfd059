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
    # Counted among the landing's own blocks: those that the receiver does not hold yet.
    first_block: int
    block_count: int
    size_bytes: int


class Ticket(msgspec.Struct, frozen=True):
    """The right to push into one landing, once. Carried only in authenticated calls.

    Segment i goes to its worker with the tag `tag` + 1 + i, its digest, sealed with `secret`, with `tag`.
    """

    # 16 random bytes; names the transfer.
    transfer_id: bytes
    # Counts re-placements of the same request.
    attempt: int
    # 32 unguessable bytes; keys the digests, and seals them.
    secret: bytes
    tag: int
    # From the receiver's issuing on.
    deadline_ms: int
    namespace: KvNamespace
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


class SegmentDigest(msgspec.Struct, frozen=True, array_like=True):
    """What the sender says it pushed, with each segment. The receiver copies to live blocks only what matches."""

    segment: int
    size_bytes: int
    digest: bytes
    # UCX transport that carries it: only the sender's endpoint knows.
    transport: str


class StoreSession(msgspec.Struct, frozen=True):
    """A worker's attachment to one KV store."""

    store_id: str
    epoch: str
    worker_address: bytes
    session_id: int
    # 32 bytes; seals the UCX messages of both.
    session_key: bytes
    namespace: KvNamespace

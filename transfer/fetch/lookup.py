"""What a worker and a store say to each other over UCX: a chain is looked up, and answered.

A lookup is `session id (8 bytes), sealed Lookup`; an answer a sealed Answer. Both are sealed with the session's key.
"""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from mesh.blocks import HASH_BYTES
from transfer.seal import Kind, seal

# A chain of 128k tokens has 2,048 hashes; a lookup of more than this many bytes is not read.
MAX_LOOKUP_BYTES = 1 << 20
MAX_ANSWER_BYTES = 256
MAX_HASHES = 32_768
_SESSION = struct.Struct("<Q")


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Worker to store: what have you of this chain? Push it into the landing described here.

    The answer goes to `answer_tag`. The landing, for a match cut by `segments.plan_whole` for the answer's
    `segment_bytes`, has the tags behind it, and `fetch_key` for its secret: see `ticket.Ticket`.
    """

    # Counts the messages of a session from 1: none is taken twice.
    sequence: int
    deadline_ms: int
    worker_address: bytes
    answer_tag: int
    segment_bytes: int
    # What a block is: both sides must mean the same.
    layers: int
    piece_bytes: int
    # HASH_BYTES each, in chain order.
    hashes: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Store to worker, before the first segment."""

    lookup: int
    # Blocks of the chain's longest known prefix, and how they are cut.
    matched: int
    segment_bytes: int


def lookup_message(session_id: int, key: bytes, lookup: Lookup) -> bytes:
    return _SESSION.pack(session_id) + seal(Kind.LOOKUP, key, lookup)


def split_lookup_message(message: bytes) -> tuple[int, bytes] | None:
    """The session that it claims to be of, and the sealed lookup; None where it is too short to be one."""
    if len(message) <= _SESSION.size:
        return None
    return _SESSION.unpack_from(message)[0], message[_SESSION.size :]


def fetch_key(session_key: bytes, sequence: int) -> bytes:
    """Of the landing for the answer to one lookup."""
    return hashlib.blake2b(_SESSION.pack(sequence), key=session_key, digest_size=32, person=b"dm-fetch").digest()


def split_hashes(joined: bytes) -> Sequence[bytes]:
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]

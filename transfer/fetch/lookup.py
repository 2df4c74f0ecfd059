"""The messages of a fetch over UCX: a worker looks up a chain, the store answers.

A lookup or receipt is `session id (8 bytes), sealed message`; an answer is a sealed Answer. All are sealed with the
session's key.
"""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from mesh.blocks import HASH_BYTES
from transfer.seal import Kind, seal

# A chain of 128k tokens has 2,048 hashes; larger lookups than this are not read.
MAX_LOOKUP_BYTES = 1 << 20
MAX_ANSWER_BYTES = 256
MAX_RECEIPT_BYTES = 256
MAX_HASHES = 32_768
_SESSION = struct.Struct("<Q")


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Worker to store: push what you have of this chain into the landing described here.

    The answer goes to `answer_tag`, and the landing uses the tags after it. `segments.plan_parts` cuts the match by the
    answer's `segment_bytes`, and `fetch_key` gives the landing's secret: see `ticket.Ticket`.
    """

    # Counts the messages of a session from 1; no number is accepted twice.
    sequence: int
    deadline_ms: int
    worker_address: bytes
    answer_tag: int
    segment_bytes: int
    # The geometry of a block; its base layers must be the same on both sides.
    layers: int
    piece_bytes: int
    # HASH_BYTES each, in chain order.
    hashes: bytes
    # The caller's span (`mesh.observe.tracing`); empty outside traces.
    traceparent: str = ""
    # Whether to send the blocks' MACs too; only workers that ask for them have room for them.
    with_macs: bool = False
    # How many of the layers, the last ones, belong to drafts.
    draft_layers: int = 0
    # Whether the worker has mapped the store's memory, so that it can copy the blocks itself.
    mapped: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Store to worker, before the first segment. Sent again, with fewer blocks, if the store cannot send all of
    them.
    """

    lookup: int
    # The number of blocks in the longest known prefix of the chain, and the largest segment that they are cut into.
    matched: int
    segment_bytes: int
    # How many leading blocks are in memory; the others are being read from disk. None from stores of the previous
    # version.
    in_memory: int | None = None
    # How many leading blocks come with their draft layers, if worker and store have as many. None from stores of the
    # previous version, whose blocks have all layers of the lookup.
    drafted: int | None = None
    # Whether the worker is to copy the blocks from the store's memory: announcements then come without segments, and
    # the store waits for a Receipt.
    mapped: bool = False
    # Sent again after a Receipt that asks for it: the blocks were leased until the store read that.
    confirmed: bool = False


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """Worker to store, on `tags.RECEIPT_TAG` and sealed as a lookup: it copies no more of a mapped answer's blocks."""

    lookup: int
    # Whether it has copied all, and trusts them once the store has confirmed that they were leased.
    confirm: bool = False


def session_message(kind: Kind, session_id: int, key: bytes, message: Lookup | Receipt) -> bytes:
    return _SESSION.pack(session_id) + seal(kind, key, message)


def split_session_message(message: bytes) -> tuple[int, bytes] | None:
    """The session that the message claims, and its sealed part; None if the message is too short to be one."""
    if len(message) <= _SESSION.size:
        return None
    return _SESSION.unpack_from(message)[0], message[_SESSION.size :]


def fetch_key(session_key: bytes, sequence: int) -> bytes:
    """Secret of the landing for the answer to one lookup."""
    return hashlib.blake2b(_SESSION.pack(sequence), key=session_key, digest_size=32, person=b"dm-fetch").digest()


def split_hashes(joined: bytes) -> Sequence[bytes]:
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]

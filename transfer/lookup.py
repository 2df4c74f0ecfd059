"""What a worker and a store say to each other over UCX: a chain looked up, credits, answers. Sealed with a keyed MAC.

A message is `session id (8 bytes), MAC (16 bytes), MessagePack body`. The MAC is keyed by the session's key, covers
session id and body, and is of one kind of message, so that none passes for another or comes back as an answer.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

import msgspec

from mesh.blocks import HASH_BYTES

MAC_BYTES = 16
# A chain of 128k tokens has 2,048 hashes; a message of more than this many bytes is not read.
MAX_MESSAGE_BYTES = 1 << 20
MAX_HASHES = 32_768
_SESSION = struct.Struct("<Q")
_HEADER_BYTES = _SESSION.size + MAC_BYTES


class Kind(Enum):
    """Of message; the value is part of the MAC."""

    LOOKUP = b"dm-lookup"
    CREDIT = b"dm-credit"
    ANSWER = b"dm-answer"


# Tags of segments and answers are below this; a store listens on these two.
FIRST_RESERVED_TAG = 1 << 63
TAG_OF_KIND = {Kind.LOOKUP: FIRST_RESERVED_TAG, Kind.CREDIT: FIRST_RESERVED_TAG + 1}


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Worker to store: what have you of this chain? Push it into the landing described here.

    The answers go to `answer_tag`, segment i of the match (planned by `segments.plan_whole` for `segment_bytes`) to
    `answer_tag` + 1 + i.
    """

    # Counts the messages of a session from 1: none is taken twice.
    sequence: int
    deadline_ms: int
    worker_address: bytes
    answer_tag: int
    # So many segments may be under way before the first `Credit`.
    credits: int
    segment_bytes: int
    # What a block is: both sides must mean the same.
    layers: int
    piece_bytes: int
    # HASH_BYTES each, in chain order.
    hashes: bytes


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """Worker to store: that many segments of the answer to this lookup may have been sent by now."""

    sequence: int
    lookup: int
    credits: int


class SentSegment(msgspec.Struct, frozen=True, array_like=True):
    index: int
    size_bytes: int
    digest: bytes
    transport: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Store to worker: one with each segment, or one alone where nothing matched."""

    lookup: int
    # Blocks of the chain's longest known prefix, and how they are cut.
    matched: int
    segment_bytes: int
    segment: SentSegment | None = None


MessageT = TypeVar("MessageT", Lookup, Credit, Answer)


def seal(kind: Kind, session_id: int, key: bytes, message: Lookup | Credit | Answer) -> bytearray:
    body = msgspec.msgpack.encode(message)
    session = _SESSION.pack(session_id)
    return bytearray(session + _mac(kind, key, session, body) + body)


def session_of(sealed: bytes) -> int | None:
    """The session that a message claims to be of; None where it is too short to be one."""
    return _SESSION.unpack_from(sealed)[0] if len(sealed) > _HEADER_BYTES else None


def unseal(kind: Kind, key: bytes, sealed: bytes, message_type: type[MessageT]) -> MessageT | None:
    """None where the MAC is wrong, or the body is not of that type."""
    session, mac, body = sealed[: _SESSION.size], sealed[_SESSION.size : _HEADER_BYTES], sealed[_HEADER_BYTES:]
    if not hmac.compare_digest(mac, _mac(kind, key, session, body)):
        return None
    try:
        return msgspec.msgpack.decode(body, type=message_type)
    except msgspec.DecodeError:
        return None


def fetch_key(session_key: bytes, sequence: int) -> bytes:
    """Keys the digests of the answer to one lookup."""
    return hashlib.blake2b(_SESSION.pack(sequence), key=session_key, digest_size=32, person=b"dm-fetch").digest()


def split_hashes(joined: bytes) -> Sequence[bytes]:
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def _mac(kind: Kind, key: bytes, session: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(session + body, key=key, digest_size=MAC_BYTES, person=kind.value).digest()

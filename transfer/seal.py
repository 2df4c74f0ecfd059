"""Sealed messages between two agents that share a key: `MAC (16 bytes), MessagePack body`.

The MAC covers the kind of message, so that a message cannot be replayed as one of another kind.
"""

import hashlib
import hmac
from enum import Enum
from typing import TypeVar

import msgspec

MAC_BYTES = 16
# Why a message was refused; a key of TransferCounters.refused.
WRONG_MAC = "wrong_mac"


class Kind(Enum):
    """The kind of a message. Its value is part of the MAC."""

    LOOKUP = b"dm-lookup"
    ANSWER = b"dm-answer"
    RECEIPT = b"dm-receipt"
    ANNOUNCEMENT = b"dm-announcement"


MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def seal(kind: Kind, key: bytes, message: msgspec.Struct) -> bytes:
    """The sealed message; `key` has 32 bytes."""
    body = msgspec.msgpack.encode(message)
    return _mac(kind, key, body) + body


def unseal(kind: Kind, key: bytes, sealed: bytes, message_type: type[MessageT]) -> MessageT | None:
    """The message; None if its MAC is wrong or its body does not have that type."""
    mac, body = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(kind, key, body)):
        return None
    try:
        return msgspec.msgpack.decode(body, type=message_type)
    except msgspec.DecodeError:
        return None


def _mac(kind: Kind, key: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=MAC_BYTES, person=kind.value).digest()

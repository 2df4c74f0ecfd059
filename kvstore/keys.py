"""How the store addresses blocks: by what the KV of their base layers means, and by their chain hash.

A block that has draft layers too has a key of its own: the same, and a mark. Workers with and without drafts thus find
each other's base layers, and a store may have a block both ways for a while.
"""

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from mesh.blocks import HASH_BYTES
from mesh.domain.workers import KvNamespace

NAMESPACE_BYTES = 8

# Namespace digest and chain hash, 24 bytes, and perhaps the mark: equal keys mean equal bytes of KV.
Key: TypeAlias = bytes
_BASE_BYTES = NAMESPACE_BYTES + HASH_BYTES
_MARK = b"d"


def namespace_digest(namespace: KvNamespace) -> bytes:
    """The same in every process for namespaces of one base."""
    fields = msgspec.structs.asdict(namespace.base)
    # Stores of the version before know no such field, and share an index with this one.
    del fields["draft_layers"]
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=NAMESPACE_BYTES, person=b"kv-namespace").digest()


def whole_key(key: Key) -> Key:
    """The key of the same block with its draft layers."""
    return key[:_BASE_BYTES] + _MARK


def base_key(key: Key) -> Key:
    """The key of the same block without draft layers."""
    return key[:_BASE_BYTES]


def is_whole(key: Key) -> bool:
    return len(key) > _BASE_BYTES


def twin_key(key: Key) -> Key:
    """The key of the same block with draft layers if this is one without them, and the reverse."""
    return base_key(key) if is_whole(key) else whole_key(key)


def keys_of(digest: bytes, hashes: Iterable[bytes]) -> list[Key]:
    return [digest + block_hash for block_hash in hashes]

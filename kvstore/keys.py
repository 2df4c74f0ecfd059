"""How the store addresses blocks: by the namespace of their base layers, and by their chain hash.

A block that also has draft layers has a separate key: the same bytes and a mark. So workers with and without drafts
find each other's base layers, and a store may hold a block in both versions for a while.
"""

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from mesh.blocks import HASH_BYTES
from mesh.domain.workers import KvNamespace

NAMESPACE_BYTES = 8

# Namespace digest and chain hash, 24 bytes, optionally followed by the mark. Equal keys mean equal bytes of KV.
Key: TypeAlias = bytes
_BASE_BYTES = NAMESPACE_BYTES + HASH_BYTES
_MARK = b"d"


def namespace_digest(namespace: KvNamespace) -> bytes:
    """A digest that is the same in every process, for all namespaces with the same base."""
    fields = msgspec.structs.asdict(namespace.base)
    # Stores of the previous version do not know this field, and share an index with this one.
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
    """The key of the same block in its other version: with draft layers if this key has none, and vice versa."""
    return base_key(key) if is_whole(key) else whole_key(key)


def keys_of(digest: bytes, hashes: Iterable[bytes]) -> list[Key]:
    return [digest + block_hash for block_hash in hashes]

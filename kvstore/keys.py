"""How the store addresses blocks: by the namespace of their base layers, and by their chain hash.

A block that also has draft layers has a separate key: the same bytes and a mark. So workers with and without drafts
find each other's base layers, and a store may hold a block in both versions for a while.
"""

from collections.abc import Iterable
from typing import TypeAlias

from mesh.blocks import HASH_BYTES
from mesh.domain.kv_identity import DIGEST_BYTES

# Namespace digest and chain hash, 24 bytes, optionally followed by the mark. `mesh.domain.kv_identity` says what equal
# keys mean.
Key: TypeAlias = bytes
_BASE_BYTES = DIGEST_BYTES + HASH_BYTES
_MARK = b"d"


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

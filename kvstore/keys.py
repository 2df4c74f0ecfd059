"""How the store addresses blocks: what the KV means, and the chain hash beside it."""

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from mesh.domain.workers import KvNamespace

NAMESPACE_BYTES = 8

# Namespace digest and chain hash, 24 bytes: equal keys mean equal bytes of KV.
Key: TypeAlias = bytes


def namespace_digest(namespace: KvNamespace) -> bytes:
    """Equal for equal namespaces, in every process."""
    return hashlib.blake2b(
        msgspec.msgpack.encode(namespace), digest_size=NAMESPACE_BYTES, person=b"kv-namespace"
    ).digest()


def keys_of(digest: bytes, hashes: Iterable[bytes]) -> list[Key]:
    return [digest + block_hash for block_hash in hashes]

"""How the store addresses blocks: by what their KV means, and by their chain hash."""

import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from mesh.domain.workers import KvNamespace

NAMESPACE_BYTES = 8

# Namespace digest and chain hash, 24 bytes: equal keys mean equal bytes of KV.
Key: TypeAlias = bytes


def namespace_digest(namespace: KvNamespace) -> bytes:
    """The same in every process for equal namespaces."""
    fields = msgspec.structs.asdict(namespace)
    # Follows from the weights and the number of layers. Stores of the version before know no such field, and share an
    # index with this one.
    del fields["draft_layers"]
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=NAMESPACE_BYTES, person=b"kv-namespace").digest()


def keys_of(digest: bytes, hashes: Iterable[bytes]) -> list[Key]:
    return [digest + block_hash for block_hash in hashes]

"""Content addresses of KV blocks: one function, which gateway, scheduler, engine and store share."""

import hashlib
import struct
from collections.abc import Sequence

BLOCK_TOKENS = 64
HASH_BYTES = 16


def root_hash(cache_salt: bytes) -> bytes:
    """The parent of a chain's first block. Tenants with different salts share no block."""
    return hashlib.blake2b(cache_salt, digest_size=HASH_BYTES, person=b"deepmesh-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block: H(parent, its 64 token ids). Equal hashes mean equal prefixes from the root on."""
    assert len(token_ids) == BLOCK_TOKENS
    packed = struct.pack(f"<{BLOCK_TOKENS}I", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=HASH_BYTES, person=b"deepmesh-block").digest()


def chain_hashes(token_ids: Sequence[int], cache_salt: bytes = b"") -> list[bytes]:
    """Hashes of every full block of `token_ids`, root first; a partial last block has none."""
    parent = root_hash(cache_salt)
    hashes = []
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = block_hash(parent, token_ids[start : start + BLOCK_TOKENS])
        hashes.append(parent)
    return hashes

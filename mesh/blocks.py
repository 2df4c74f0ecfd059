"""Content addresses of KV blocks: the one hash function that gateway, scheduler, engine and store share."""

import hashlib
import struct
from collections.abc import Iterator, Sequence

from mesh.domain.sparse_prefill import SparsePrefill

BLOCK_TOKENS = 64
HASH_BYTES = 16
_TOKENS = struct.Struct(f"<{BLOCK_TOKENS}I")
# Copied for each block: creating a new hash object takes as long as hashing a block.
_BLOCK_HASH = hashlib.blake2b(digest_size=HASH_BYTES, person=b"deepmesh-block")


def blocks_for(tokens: int) -> int:
    """How many blocks `tokens` tokens take; the last may be partial."""
    return -(-tokens // BLOCK_TOKENS)


def root_hash(cache_salt: bytes) -> bytes:
    """The parent of a chain's first block. Tenants with different salts share no block."""
    return hashlib.blake2b(cache_salt, digest_size=HASH_BYTES, person=b"deepmesh-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block: H(parent, its 64 token ids). Equal hashes mean equal prefixes from the root on."""
    assert len(token_ids) == BLOCK_TOKENS
    hashed = _BLOCK_HASH.copy()
    hashed.update(parent + _TOKENS.pack(*token_ids))
    return hashed.digest()


def parent_hash(before: bytes, index: int, sparse: SparsePrefill | None) -> bytes:
    """The parent hash of block `index`. `before` is the hash of the block before it, or the root.

    From the first token with sparse attention on, KV differs from that of an exact prompt. At that block the chain
    therefore branches, and only requests with the same sparse setting share what follows.
    """
    if sparse is None or index != sparse.from_tokens // BLOCK_TOKENS:
        return before
    mode = struct.pack("<Qd", sparse.from_tokens, sparse.recall)
    return hashlib.blake2b(before + mode, digest_size=HASH_BYTES, person=b"deepmesh-sparse").digest()


def iter_chain(
    token_ids: Sequence[int], cache_salt: bytes = b"", sparse: SparsePrefill | None = None
) -> Iterator[bytes]:
    """Hashes of every full block of `token_ids`, root first; a partial last block has none.

    sparse: how the attention of later tokens is computed; None if exactly.
    """
    before = root_hash(cache_salt)
    for index in range(len(token_ids) // BLOCK_TOKENS):
        start = index * BLOCK_TOKENS
        before = block_hash(parent_hash(before, index, sparse), token_ids[start : start + BLOCK_TOKENS])
        yield before


def chain_hashes(token_ids: Sequence[int], cache_salt: bytes = b"", sparse: SparsePrefill | None = None) -> list[bytes]:
    """All of `iter_chain`."""
    return list(iter_chain(token_ids, cache_salt, sparse))

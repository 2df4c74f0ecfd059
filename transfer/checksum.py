"""Checksum of a segment: the xxh3_64 of each of its 64 KiB chunks, seeded from the transfer's key.

Chunks are independent, so that a GPU can hash and compare them in parallel. A checksum detects accidental corruption
and misplaced bytes, including bytes of another transfer. It is not a MAC: an attacker who sees enough bytes and can
change them may find others with the same hashes. `block_macs` has the MACs for blocks in stores.
"""

import hashlib
import hmac

import numpy as np
import xxhash

CHUNK_BYTES = 64 << 10
HASH_BYTES = 8

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def seed_of(key: bytes) -> int:
    """The 64-bit seed of the hashes."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"dm-checksum-seed").digest(), "little")


def segment_checksum(buffer: Bytes, size_bytes: int, key: bytes) -> bytes:
    """Checksum of the first `size_bytes` of `buffer`: its chunks' hashes in order, 8 bytes each, little-endian."""
    seed = seed_of(key)
    view = buffer[:size_bytes].data
    return b"".join(_hash(view[start : start + CHUNK_BYTES], seed) for start in range(0, size_bytes, CHUNK_BYTES))


def checksum_bytes(size_bytes: int) -> int:
    """Length of the checksum of `size_bytes` bytes."""
    return HASH_BYTES * -(-size_bytes // CHUNK_BYTES)


def same(left: bytes, right: bytes) -> bool:
    """Compare in constant time, so that timing does not reveal how much of a guess was right."""
    return hmac.compare_digest(left, right)


def _hash(data: memoryview, seed: int) -> bytes:
    return xxhash.xxh3_64_intdigest(data, seed).to_bytes(HASH_BYTES, "little")

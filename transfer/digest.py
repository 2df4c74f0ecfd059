"""Keyed digest of a segment: the xxh3_64 of each of its 64 KiB chunks, seeded from the transfer's key.

Chunks are independent, so that a GPU can hash and compare them in parallel. A digest finds bytes that were corrupted or
misplaced. It travels sealed with the key, which only an authenticated call carries.
"""

import hashlib
import hmac

import numpy as np
import xxhash

CHUNK_BYTES = 64 << 10

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def seed_of(key: bytes) -> int:
    """The 64-bit seed of the hashes."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"deepmesh-digest").digest(), "little")


def segment_digest(buffer: Bytes, size_bytes: int, key: bytes) -> bytes:
    """Digest of the first `size_bytes` of `buffer`: the hashes of its chunks in order, 8 bytes each, little-endian."""
    seed = seed_of(key)
    view = buffer[:size_bytes].data
    hashes = (
        xxhash.xxh3_64_intdigest(view[start : start + CHUNK_BYTES], seed) for start in range(0, size_bytes, CHUNK_BYTES)
    )
    return b"".join(each.to_bytes(8, "little") for each in hashes)


def digest_bytes(size_bytes: int) -> int:
    """Length of the digest of so many bytes."""
    return 8 * -(-size_bytes // CHUNK_BYTES)


def same(left: bytes, right: bytes) -> bool:
    """Compare in constant time, so that nobody learns how much of a guess was right."""
    return hmac.compare_digest(left, right)

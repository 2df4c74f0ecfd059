"""Keyed digest of a segment: xxh3_128 over the xxh3_64 of its 64 KiB chunks, both seeded from the transfer's key.

Chunks are independent, so that a GPU can hash them in parallel. It finds corrupted, misplaced and forged bytes; who
may push at all is settled by the authenticated call that carries it.
"""

import hashlib
import hmac

import numpy as np
import xxhash

CHUNK_BYTES = 64 << 10
DIGEST_BYTES = 16

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def seed_of(key: bytes) -> int:
    """The 64-bit seed of both hashes."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"deepmesh-digest").digest(), "little")


def combine(chunk_hashes: bytes, seed: int) -> bytes:
    """Digest of a segment from its chunks' hashes, 8 bytes each, little-endian, in order."""
    return xxhash.xxh3_128_digest(chunk_hashes, seed)


def segment_digest(buffer: Bytes, size_bytes: int, key: bytes) -> bytes:
    """Digest of the first `size_bytes` of `buffer`."""
    seed = seed_of(key)
    view = buffer[:size_bytes].data
    hashes = (
        xxhash.xxh3_64_intdigest(view[start : start + CHUNK_BYTES], seed) for start in range(0, size_bytes, CHUNK_BYTES)
    )
    return combine(b"".join(each.to_bytes(8, "little") for each in hashes), seed)


def same(left: bytes, right: bytes) -> bool:
    """In a time that does not tell how much of a guess was right."""
    return hmac.compare_digest(left, right)

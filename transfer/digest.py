"""Keyed digest of a segment: xxh3_128 over the xxh3_64 of its 64 KiB chunks, both seeded from the transfer's key.

Chunks are independent, so that a GPU can hash them in parallel, and a CPU while they are in its
cache from the copy. It finds corrupted, misplaced and forged bytes; who may push at all is settled by the
authenticated call that carries it.
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


class SegmentHasher:
    """Digest of a buffer that fills from its start: `advance` hashes chunks as they become full."""

    def __init__(self, buffer: Bytes, key: bytes) -> None:
        self._buffer = buffer
        self._seed = seed_of(key)
        self._hashed = 0
        self._chunks = bytearray()

    def advance(self, filled_bytes: int) -> None:
        while self._hashed + CHUNK_BYTES <= filled_bytes:
            self._hash_to(self._hashed + CHUNK_BYTES)

    def finish(self, size_bytes: int) -> bytes:
        """Digest of the first `size_bytes`."""
        self.advance(size_bytes)
        if self._hashed < size_bytes:
            self._hash_to(size_bytes)
        return combine(bytes(self._chunks), self._seed)

    def _hash_to(self, end: int) -> None:
        self._chunks += xxhash.xxh3_64_intdigest(self._buffer[self._hashed : end].data, self._seed).to_bytes(
            8, "little"
        )
        self._hashed = end


def combine(chunk_hashes: bytes, seed: int) -> bytes:
    """Digest of a segment from its chunks' hashes, 8 bytes each, little-endian, in order."""
    return xxhash.xxh3_128_digest(chunk_hashes, seed)


def segment_digest(buffer: Bytes, size_bytes: int, key: bytes) -> bytes:
    """Digest of the first `size_bytes` of `buffer`."""
    return SegmentHasher(buffer, key).finish(size_bytes)


def same(left: bytes, right: bytes) -> bool:
    """In a time that does not tell how much of a guess was right."""
    return hmac.compare_digest(left, right)

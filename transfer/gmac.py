"""GMAC (NIST SP 800-38D) under AES-256 of the pieces of a block: a polynomial hash over GF(2^128) of the bytes and of
their length (GHASH), hidden by AES. A piece's nonce is its layer, so one key must never tag a layer twice.

A host computes it with `tags`. What hashes by itself, such as a GPU, takes `hash_key_and_masks`.
"""

from collections.abc import Sequence
from functools import lru_cache

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
TAG_BYTES = 16
_NONCE_BYTES = 12


def tags(key: bytes, first_layer: int, pieces: Sequence[memoryview]) -> bytes:
    """The tags of pieces in consecutive layers, TAG_BYTES each."""
    cipher = AESGCM(key)
    return b"".join(cipher.encrypt(_nonce(layer), b"", piece) for layer, piece in enumerate(pieces, first_layer))


def hash_key_and_masks(key: bytes, first_layer: int, layers: int) -> tuple[bytes, bytes]:
    """What GHASH multiplies by, and what its hashes of pieces in consecutive layers are to be combined with by XOR."""
    # Each is encrypted by itself: the mode is the block cipher's own.
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    encrypted = cipher.update(_counters(first_layer, layers))
    return encrypted[:TAG_BYTES], encrypted[TAG_BYTES:]


# Blocks differ by their keys alone.
@lru_cache(maxsize=1024)
def _counters(first_layer: int, layers: int) -> bytes:
    """Zero, and the first counter after each layer's nonce."""
    counters = (_nonce(layer) + (1).to_bytes(4) for layer in range(first_layer, first_layer + layers))
    return b"".join((bytes(TAG_BYTES), *counters))


def _nonce(layer: int) -> bytes:
    return layer.to_bytes(_NONCE_BYTES, "little")

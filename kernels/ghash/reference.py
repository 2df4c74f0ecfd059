"""GHASH in plain Python: the definition."""

from collections.abc import Sequence

import torch

# x^128 = 1 + x + x^2 + x^7, the coefficient of x^0 being the highest bit.
_REDUCTION = 0xE1 << 120


def hash_pieces(planes: Sequence[torch.Tensor], pieces: torch.Tensor, keys: torch.Tensor, hashes: torch.Tensor) -> None:
    for (layer, block, key), out in zip(pieces.tolist(), hashes, strict=True):
        piece = b"".join(bytes(plane[layer, block].tolist()) for plane in planes)
        hashed = ghash(bytes(keys[key].tolist()), piece + (8 * len(piece)).to_bytes(8) + bytes(8))
        out.copy_(torch.tensor(list(hashed), dtype=torch.uint8))


def ghash(key: bytes, units: bytes) -> bytes:
    """units: a multiple of 16 bytes."""
    factor, hashed = int.from_bytes(key), 0
    for start in range(0, len(units), 16):
        hashed = _product(hashed ^ int.from_bytes(units[start : start + 16]), factor)
    return hashed.to_bytes(16)


def _product(x: int, y: int) -> int:
    product = 0
    for bit in reversed(range(128)):
        if x >> bit & 1:
            product ^= y
        y = y >> 1 ^ (_REDUCTION if y & 1 else 0)
    return product

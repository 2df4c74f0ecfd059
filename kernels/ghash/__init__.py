"""GHASH of pieces of a KV pool: the polynomial hash over GF(2^128) that GMAC hides by AES (NIST SP 800-38D, 6.4)."""

from collections.abc import Sequence

import torch

from kernels.ghash import reference

# The size of a hash, of a key, and of a unit of what is hashed.
UNIT_BYTES = 16


def hash_pieces(planes: Sequence[torch.Tensor], pieces: torch.Tensor, keys: torch.Tensor, hashes: torch.Tensor) -> None:
    """Write the hash of each piece's bytes and of their length to `hashes`: [pieces, 16] uint8.

    planes: the one or two pools of which a piece has a part in each, [layers, blocks, bytes] uint8 contiguous, the
    bytes whole units; pieces: [pieces, 3] int32: layer, block, number of the key; keys: [keys, 16] uint8. On a GPU: two
    kernels, for which the planes lie there and the others there or in page-locked memory, which must stay until the
    kernels have ended; the definition elsewhere.
    """
    assert len(planes) in (1, 2) and pieces.dtype == torch.int32 and keys.dtype == hashes.dtype == torch.uint8
    assert all(plane.dtype == torch.uint8 and plane.is_contiguous() for plane in planes)
    assert all(plane.shape[2] % UNIT_BYTES == 0 for plane in planes), "a piece has whole units"
    assert pieces.is_contiguous() and keys.is_contiguous() and hashes.is_contiguous() and len(hashes) == len(pieces)
    if planes[0].is_cuda:
        from kernels.ghash import cuda_pieces

        cuda_pieces.hash_pieces(planes, pieces, keys, hashes)
    else:
        reference.hash_pieces(planes, pieces, keys, hashes)


def prepare(device: torch.device) -> None:
    """Begin to compile what hashes on a GPU, in another thread."""
    if device.type == "cuda":
        from kernels.ghash import cuda_pieces

        cuda_pieces.prepare(device)

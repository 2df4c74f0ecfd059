"""Random pieces of a KV pool, and keys to hash them with."""

import torch

# Bytes of a piece in each plane: a unit, units as threads of a block and one less, and two planes.
PIECES = ((16,), (4080,), (4096,), (4800, 272))


def hashed_pieces(widths: tuple[int, ...]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """planes, pieces, keys and hashes as `kernels.ghash.hash_pieces` takes them."""
    planes = [torch.randint(256, (3, 5, width), dtype=torch.uint8) for width in widths]
    pieces = torch.tensor([[2, 4, 0], [0, 1, 1], [1, 3, 0]], dtype=torch.int32)
    keys = torch.randint(256, (2, 16), dtype=torch.uint8)
    return planes, pieces, keys, torch.zeros((len(pieces), 16), dtype=torch.uint8)

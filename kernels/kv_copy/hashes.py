"""Hashes of what is staged, on their way to the host."""

import torch

from kernels.host_copy import HostCopies
from kernels.kv_copy import reference, xxh3


class ChunkHashes:
    """XXH3's 64-bit hash of each 64 KiB of some bytes and of the rest, begun on the current stream."""

    def __init__(self, data: torch.Tensor, seed: int) -> None:
        """data: [bytes] uint8 contiguous, left as it is until they are completed; seed: unsigned 64 bits."""
        assert data.dtype == torch.uint8 and data.is_contiguous() and 0 <= seed < 1 << 64
        self._seed = seed
        by_kernel = _hashed_by_kernel(data)
        # The rest itself.
        parts = [data[by_kernel:]]
        if by_kernel:
            from kernels.kv_copy import triton

            parts.append(triton.chunk_hashes(data[:by_kernel], seed))
        self._copies = HostCopies(parts)

    @property
    def completed(self) -> bool:
        return self._copies.completed

    def read(self) -> bytes:
        """8 bytes each, little-endian, in order. Waits for them."""
        rest, *hashes = self._copies.read()
        return b"".join(each.numpy().tobytes() for each in hashes) + reference.chunk_hashes(rest, self._seed)


def _hashed_by_kernel(data: torch.Tensor) -> int:
    """How many of the bytes."""
    if not data.is_cuda:
        return 0
    # A short rest is hashed in another way, and hardly worth a kernel.
    rest = len(data) % xxh3.CHUNK_BYTES
    return len(data) if rest >= xxh3.SHORTEST_LONG else len(data) - rest

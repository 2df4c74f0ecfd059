"""Hashes of what is staged, on their way to the host."""

import torch

from kernels.host_copy import HostCopies
from kernels.kv_copy import reference, xxh3


class HashSeed:
    """A seed where hashes are computed: to be kept for all that is hashed with it."""

    def __init__(self, value: int, device: torch.device) -> None:
        """value: unsigned 64 bits."""
        assert 0 <= value < 1 << 64
        self.value = value
        self.table: torch.Tensor | None = None
        if device.type == "cuda":
            from kernels.kv_copy import triton

            self.table = triton.seeded_table(value, device)


class ChunkHashes:
    """XXH3's 64-bit hash of each 64 KiB of some bytes and of the rest, begun on the current stream."""

    def __init__(self, data: torch.Tensor, seed: HashSeed) -> None:
        """data: [bytes] uint8 contiguous, on the seed's device; it stays as it is until they are completed."""
        assert data.dtype == torch.uint8 and data.is_contiguous()
        self._seed = seed.value
        by_kernel = 0 if seed.table is None else _hashed_by_kernel(len(data))
        parts = []
        self._has_rest = by_kernel < len(data)
        if self._has_rest:
            parts.append(data[by_kernel:])
        if seed.table is not None and by_kernel:
            from kernels.kv_copy import triton

            parts.append(triton.launch_hashes(data[:by_kernel], seed.table))
        self._copies = HostCopies(parts) if parts else None

    @property
    def completed(self) -> bool:
        return self._copies is None or self._copies.completed

    def read(self) -> bytes:
        """8 bytes each, little-endian, in order. Waits for them."""
        parts = [] if self._copies is None else self._copies.read()
        rest = reference.chunk_hashes(parts.pop(0), self._seed) if self._has_rest else b""
        return b"".join(part.numpy().tobytes() for part in parts) + rest


def _hashed_by_kernel(size_bytes: int) -> int:
    """How many of the bytes: a short rest is hashed in another way, and hardly worth a kernel."""
    rest = size_bytes % xxh3.CHUNK_BYTES
    return size_bytes if rest >= xxh3.SHORTEST_LONG else size_bytes - rest

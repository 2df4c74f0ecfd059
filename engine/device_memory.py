"""KV in a GPU's memory, as the transfer thread sees it."""

from collections.abc import Sequence

import torch
from cuda.bindings import driver

from kernels.kv_copy import chunk_hashes, gather_blocks, scatter_blocks
from mesh.errors import EngineFailed
from transfer.digest import combine, seed_of


class PlainAllocation:
    """Device memory of the driver's own: torch's expandable segments cannot be mapped by another process."""

    def __init__(self, size_bytes: int) -> None:
        status, address = driver.cuMemAlloc(size_bytes)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EngineFailed(f"{size_bytes} bytes of GPU memory for KV transfers cannot be had: {status.name}")
        self._address = int(address)
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            driver.cuMemFree(self._address)


class DeviceMemory:
    """A `transfer.memory.KvMemory` over a KV pool on a GPU. Every call waits for its own work, on a stream of its own.

    What it gathers was computed before (the caller has waited for that), what it scatters is there when it returns.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        """pool: [layers, blocks, 64, width] contiguous."""
        assert pool.is_cuda and pool.is_contiguous()
        self.layers, self.blocks = pool.shape[:2]
        self.piece_bytes = pool[0, 0].numel() * pool.itemsize
        self._pool = pool
        self._stream = torch.cuda.Stream(pool.device)

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self._pool.device):
            # Gives this thread torch's context, which the driver's calls work in.
            torch.cuda.current_stream().synchronize()
            return torch.as_tensor(PlainAllocation(size_bytes), device=self._pool.device)

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: torch.Tensor, key: bytes
    ) -> bytes:
        with torch.cuda.stream(self._stream):
            gather_blocks(self._pool, first_layer, layer_count, self._ids(blocks), staging)
            return self._digest(staging, layer_count * len(blocks) * self.piece_bytes, key)

    def digest(self, staging: torch.Tensor, size_bytes: int, key: bytes) -> bytes:
        with torch.cuda.stream(self._stream):
            return self._digest(staging, size_bytes, key)

    def scatter(self, staging: torch.Tensor, first_layer: int, layer_count: int, blocks: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            scatter_blocks(staging, self._pool, first_layer, layer_count, self._ids(blocks))
        self._stream.synchronize()

    def _digest(self, staging: torch.Tensor, size_bytes: int, key: bytes) -> bytes:
        seed = seed_of(key)
        return combine(chunk_hashes(staging[:size_bytes], seed), seed)

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int32).to(self._pool.device)

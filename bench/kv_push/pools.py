"""KV to push and to push into: in host memory, or on a GPU."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesh.blocks import BLOCK_TOKENS
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory


@dataclass(frozen=True)
class Geometry:
    layers: int
    # Blocks of all requests together.
    blocks: int
    piece_bytes: int
    requests: int = 1

    @property
    def size_bytes(self) -> int:
        return self.layers * self.blocks * self.piece_bytes


class HostPool:
    def __init__(self, geometry: Geometry) -> None:
        shape = (geometry.layers, geometry.blocks, geometry.piece_bytes)
        self._pool = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

    def memory(self) -> KvMemory:
        return HostMemory(self._pool)

    def bare(self) -> Any:
        """As many contiguous bytes, for UCX alone."""
        return self._pool.reshape(-1)


class DevicePool:
    """On the one GPU that this process sees."""

    def __init__(self, geometry: Geometry) -> None:
        import torch

        assert geometry.piece_bytes % BLOCK_TOKENS == 0
        shape = (geometry.layers, geometry.blocks, BLOCK_TOKENS, geometry.piece_bytes // BLOCK_TOKENS)
        self._pool = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
        self._size_bytes = geometry.size_bytes

    def memory(self) -> KvMemory:
        # Only here: it needs CUDA's bindings.
        from engine.runner.device_memory import DeviceMemory

        return DeviceMemory(self._pool)

    def bare(self) -> Any:
        """As `HostPool`'s. UCX must have been started before: of memory that is older it does not know where it is."""
        import torch

        from engine.runner.device_memory import PlainAllocation

        return torch.as_tensor(PlainAllocation(self._size_bytes), device="cuda")


def make_pool(gpu: str | None, geometry: Geometry) -> HostPool | DevicePool:
    """gpu: as in CUDA_VISIBLE_DEVICES, which is set; None for host memory."""
    if gpu is None:
        return HostPool(geometry)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return DevicePool(geometry)

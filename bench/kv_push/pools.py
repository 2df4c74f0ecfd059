"""Pools of KV to push from and to push into, in host memory or on a GPU."""

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
        """The pool's bytes as one contiguous array, for bare UCX."""
        return self._pool.reshape(-1)


class DevicePool:
    """A pool on the one GPU that this process sees."""

    def __init__(self, geometry: Geometry) -> None:
        import torch

        assert geometry.piece_bytes % BLOCK_TOKENS == 0
        shape = (geometry.layers, geometry.blocks, BLOCK_TOKENS, geometry.piece_bytes // BLOCK_TOKENS)
        self._pool = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
        self._size_bytes = geometry.size_bytes

    def memory(self) -> KvMemory:
        # Imported here, because it needs CUDA's bindings.
        from engine.runner.device_memory import DeviceMemory

        return DeviceMemory(self._pool)

    def bare(self) -> Any:
        """As many contiguous bytes on the GPU, for bare UCX. UCX must have started before: it does not recognize older
        allocations as device memory.
        """
        import torch

        from engine.runner.device_memory import PlainAllocation

        return torch.as_tensor(PlainAllocation(self._size_bytes), device="cuda")


def make_pool(gpu: str | None, geometry: Geometry) -> HostPool | DevicePool:
    """gpu: a value of CUDA_VISIBLE_DEVICES, which this function sets; None for host memory."""
    if gpu is None:
        return HostPool(geometry)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    return DevicePool(geometry)

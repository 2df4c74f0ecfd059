"""KV in a GPU's memory, as the transfer thread sees it."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from cuda.bindings import driver

from kernels.host_copy import to_device
from kernels.kv_copy import gather_blocks, scatter_blocks
from kernels.kv_copy.hashes import ChunkHashes, HashSeed
from mesh.errors import EngineFailed
from transfer.digest import combine, seed_of

_WARM_KEY = bytes(32)
# Transfers whose seeds are kept on the device: about as many as are under way.
_KEPT_SEEDS = 64


class PlainAllocation:
    """Device memory of the driver's own: torch's expandable segments cannot be mapped by another process."""

    def __init__(self, size_bytes: int) -> None:
        status, address = driver.cuMemAlloc(size_bytes)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EngineFailed(
                f"no {size_bytes} bytes of GPU memory for KV transfers ({status.name}): lower engine.total_blocks or"
                " engine.kv_memory_fraction, or engine.transfer.slots"
            )
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
    """A `transfer.memory.KvMemory` over a KV pool on a GPU, on a stream of its own beside the engine's.

    The two are ordered by the host alone: what is gathered belongs to a step or layer that is known to be over, blocks
    that are scattered to belong to no step under way, and steps that read them are launched after that has completed.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        """pool: [layers, blocks, 64, width] contiguous."""
        assert pool.is_cuda and pool.is_contiguous()
        self.layers, self.blocks = pool.shape[:2]
        self.piece_bytes = pool[0, 0].numel() * pool.itemsize
        self._pool = pool
        self._stream = torch.cuda.Stream(pool.device)
        self._seed = lru_cache(_KEPT_SEEDS)(self._make_seed)
        self._compile()

    def allocate_staging(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self._pool.device):
            # Gives this thread torch's context, which the driver's calls work in.
            torch.cuda.current_stream().synchronize()
            return torch.as_tensor(PlainAllocation(size_bytes), device=self._pool.device)

    def enter_thread(self) -> None:
        # UCX's copies, too, work in the thread's context.
        torch.cuda.set_device(self._pool.device)
        torch.cuda.current_stream().query()

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: torch.Tensor, key: bytes
    ) -> "_Digest":
        with torch.cuda.stream(self._stream):
            gather_blocks(self._pool, first_layer, layer_count, self._ids(blocks), staging)
            return _Digest(staging[: layer_count * len(blocks) * self.piece_bytes], self._seed(key))

    def digest(self, staging: torch.Tensor, size_bytes: int, key: bytes) -> "_Digest":
        with torch.cuda.stream(self._stream):
            return _Digest(staging[:size_bytes], self._seed(key))

    def scatter(self, staging: torch.Tensor, first_layer: int, layer_count: int, blocks: Sequence[int]) -> "_Copy":
        with torch.cuda.stream(self._stream):
            scatter_blocks(staging, self._pool, first_layer, layer_count, self._ids(blocks))
            return _Copy()

    def _make_seed(self, key: bytes) -> HashSeed:
        return HashSeed(seed_of(key), self._pool.device)

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(blocks, np.int32), self._pool.device)

    def _compile(self) -> None:
        """Now, and not while requests wait."""
        staging = torch.empty(self.piece_bytes, dtype=torch.uint8, device=self._pool.device)
        self.gather(0, 1, [0], staging, _WARM_KEY).result()
        self.scatter(staging, 0, 1, [0]).result()


class _Digest:
    def __init__(self, staged: torch.Tensor, seed: HashSeed) -> None:
        self._seed = seed.value
        self._hashes = ChunkHashes(staged, seed)

    @property
    def completed(self) -> bool:
        return self._hashes.completed

    def result(self) -> bytes:
        return combine(self._hashes.read(), self._seed)


class _Copy:
    """What the current stream was told to do."""

    def __init__(self) -> None:
        self._done = torch.cuda.Event(blocking=True)
        self._done.record()

    @property
    def completed(self) -> bool:
        return self._done.query()

    def result(self) -> None:
        self._done.synchronize()

"""KV in a GPU's memory, as the transfer thread sees it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from cuda.bindings import driver

from engine.runner.device_source import DeviceSource
from engine.runner.piece_tags import TagsInProgress
from kernels import ghash
from kernels.kv_copy.segment import SegmentBuffer, Table
from kernels.kv_copy.xxh3 import seeded_table
from mesh.errors import EngineFailed
from transfer.checksum import Bytes, seed_of
from transfer.memory import HostSource, KeyedPieces, Pool
from transfer.segments import Tile

# How many transfers' tables are kept: about as many as are open at a time.
_KEPT_TABLES = 256


class PlainAllocation:
    """Device memory from the driver: torch's expandable segments cannot be mapped by another process."""

    def __init__(self, size_bytes: int) -> None:
        status, address = driver.cuMemAlloc(size_bytes)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EngineFailed(
                f"no {size_bytes} bytes of GPU memory for KV transfers ({status.name}): lower engine.total_blocks or"
                " engine.kv_memory_fraction, or engine.transfer.slots"
            )
        self._address = int(address)
        self.__cuda_array_interface__ = _interface(self._address, size_bytes)

    def __getitem__(self, part: slice) -> "_Part":
        """The bytes from the start up to `part.stop`."""
        assert part.start in (None, 0) and part.step is None
        return _Part(self._address, part.stop, self)

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            driver.cuMemFree(self._address)


class _Part:
    """A part of an allocation, which it keeps alive."""

    def __init__(self, address: int, size_bytes: int, whole: PlainAllocation) -> None:
        self._whole = whole
        self.__cuda_array_interface__ = _interface(address, size_bytes)


def _interface(address: int, size_bytes: int) -> dict[str, Any]:
    return {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


class DeviceSlot:
    """A staging buffer, and what moves segments through it."""

    def __init__(self, planes: Sequence[torch.Tensor], size_bytes: int) -> None:
        self._allocation = PlainAllocation(size_bytes)
        # The tensor holds the allocation where the garbage collector does not look. If the slot were the allocation,
        # the two would keep each other, and the pool, for as long as the process lives.
        self.tensor = torch.as_tensor(self._allocation, device=planes[0].device)
        self.segment = SegmentBuffer(planes, self.tensor)
        # Recorded after the slot's last job.
        self.done = torch.cuda.Event(blocking=True)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._allocation.__cuda_array_interface__

    @property
    def slot(self) -> "DeviceSlot":
        return self

    def take(self, size_bytes: int) -> None:
        """What was gathered into the slot is to be sent: it lies here already."""

    def give(self, size_bytes: int) -> None:
        """What was received is to be landed from the slot: it lies here already."""

    def __getitem__(self, part: slice) -> "_Part":
        """The bytes from the start up to `part.stop`."""
        return self._allocation[part]


class HostSide:
    """A slot's page-locked memory on the host. A peer whose UCX knows no GPU can neither take what lies on one nor send
    there (openucx/ucx#9975). Copies are queued on the current stream.
    """

    def __init__(self, slot: DeviceSlot) -> None:
        self.slot = slot
        self._tensor = torch.empty(len(slot.tensor), dtype=torch.uint8, pin_memory=True)

    def __getitem__(self, part: slice) -> Bytes:
        bytes_: Bytes = self._tensor.numpy()[part]
        return bytes_

    def take(self, size_bytes: int) -> None:
        """What was gathered into the slot is to be sent from here."""
        self._tensor[:size_bytes].copy_(self.slot.tensor[:size_bytes], non_blocking=True)

    def give(self, size_bytes: int) -> None:
        """What was received here is to be landed from the slot."""
        self.slot.tensor[:size_bytes].copy_(self._tensor[:size_bytes], non_blocking=True)


class DeviceMemory:
    """A `transfer.memory.KvMemory` over the planes of a KV pool on a GPU, with a stream of its own.

    The host alone orders the two streams: it gathers KV of steps or layers that it knows to be over, it lands KV in
    blocks that no step in flight uses, and it launches steps that read these blocks after the landing has completed.
    """

    is_on_gpu = True

    def __init__(self, *planes: torch.Tensor) -> None:
        """planes: see `SegmentBuffer`."""
        assert all(plane.is_cuda and plane.is_contiguous() for plane in planes)
        self.layers, self.blocks = planes[0].shape[:2]
        self.piece_bytes = sum(plane[0, 0].numel() * plane.itemsize for plane in planes)
        self._planes, self._device = planes, planes[0].device
        self._stream = torch.cuda.Stream(self._device)
        # Made as transfers with stores use them.
        self._host_sides: dict[DeviceSlot, HostSide] = {}
        self._table = lru_cache(_KEPT_TABLES)(_table_of)
        ghash.prepare(self._device)

    def allocate_staging(self, size_bytes: int) -> DeviceSlot:
        # This gives the thread torch's context, which the driver's calls need, and waits until the pool is there.
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.stream(self._stream):
            return DeviceSlot(self._planes, size_bytes)

    def enter_thread(self) -> None:
        # UCX's copies need the thread's context too.
        torch.cuda.set_device(self._device)
        # Once for the thread: to change streams for each launch would take longer than the launch.
        torch.cuda.set_stream(self._stream)
        self._stream.query()

    def host_side(self, staging: DeviceSlot) -> HostSide:
        if staging not in self._host_sides:
            self._host_sides[staging] = HostSide(staging)
        return self._host_sides[staging]

    def received(self, staging: DeviceSlot | HostSide, size_bytes: int) -> None:
        staging.give(size_bytes)

    def tags(self, staging: DeviceSlot | HostSide, tile: Tile, keyed: Sequence[KeyedPieces]) -> list[bytes]:
        staged = staging.slot.tensor[: tile.pieces * self.piece_bytes]
        pieces = staged.view(tile.layer_count, tile.block_count, self.piece_bytes)
        tags = TagsInProgress([pieces], range(tile.block_count), keyed, tile.first_layer)
        self._stream.synchronize()
        return tags.result()

    def host_source(self, mapped: Pool) -> HostSource:
        source = DeviceSource(mapped, self._planes, self._stream)
        source.lock_ahead()
        return source

    def prepare(self, key: bytes) -> None:
        self._table(key)

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: DeviceSlot | HostSide, key: bytes
    ) -> "_Gathered":
        slot = staging.slot
        slot.segment.gather(first_layer, layer_count, blocks, self._table(key))
        staging.take(layer_count * len(blocks) * self.piece_bytes)
        slot.done.record(self._stream)
        return _Gathered(slot)

    def land(
        self,
        first_layer: int,
        layer_count: int,
        blocks: Sequence[int],
        staging: DeviceSlot | HostSide,
        key: bytes,
        checksum: bytes,
    ) -> "_Landed":
        slot = staging.slot
        slot.segment.land(first_layer, layer_count, blocks, self._table(key), checksum)
        slot.done.record(self._stream)
        return _Landed(slot)


class _Enqueued:
    """A slot's job on the device."""

    def __init__(self, slot: DeviceSlot) -> None:
        self._slot = slot

    @property
    def completed(self) -> bool:
        completed: bool = self._slot.done.query()
        return completed


class _Gathered(_Enqueued):
    def result(self) -> bytes:
        """To be called before the slot's next job."""
        self._slot.done.synchronize()
        return self._slot.segment.hashes()


class _Landed(_Enqueued):
    def result(self) -> bool:
        """To be called before the slot's next job."""
        self._slot.done.synchronize()
        return self._slot.segment.landed()


def _table_of(key: bytes) -> Table:
    return seeded_table(seed_of(key))

"""Memory that another process shares, as a GPU copies from it."""

import logging
import math
import mmap
from collections.abc import Callable, Sequence

import torch
from cuda.bindings import driver

from engine.runner.locked_regions import LockedRegions
from engine.runner.locking_ahead import lock_ahead
from engine.runner.piece_tags import TagsInProgress
from mesh.memory.mapped_pages import enter_pages, filled_share
from transfer.landing import NOT_COPIED
from transfer.memory import Check, Pending, Pool
from transfer.segments import Tile

_log = logging.getLogger("deepmesh.engine")

# About so much is locked by a call, for which the transfer thread waits.
REGION_BYTES = 64 << 20
# A region counts as filled from here on: blocks may have room for draft layers that were never written.
FILLED_SHARE = 0.9
# The longest distance between two rows of a copy: CU_DEVICE_ATTRIBUTE_MAX_PITCH of all cards so far.
MOST_PITCH = (1 << 31) - 1


class DeviceSource:
    """A `transfer.memory.HostSource` for a pool on a GPU. A block's layers lie one after the other in the source, and
    far apart in the pool: a copy of rows takes them all. Copies are queued on one stream, and use no processor. Blocks
    are checked in the pool, where their owner cannot change them any more.
    """

    def __init__(self, mapped: Pool, planes: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        """mapped: [blocks, layers, bytes], whose pages can be written, although nothing here writes them; planes: of
        the pool, [layers, blocks, ...] contiguous: a piece has a part in each. Raises OSError if CUDA cannot page-lock
        it.
        """
        _, layers, self._piece_bytes = mapped.shape
        self._mapped = mapped
        self._planes = [_Plane(plane) for plane in planes]
        self._bytes = [plane.flatten(2).view(torch.uint8) for plane in planes]
        self._stream = stream
        self._block_bytes = layers * self._piece_bytes
        # They are given back when the last reference to the source goes, so they must not refer to it.
        locks = _PageLocks(mapped)
        self._regions = LockedRegions(mapped.nbytes, locks.lock, _region_bytes(self._block_bytes))
        self._regions.lock_at(0)
        if not locks.starts:
            raise OSError(f"CUDA cannot page-lock it ({locks.status.name})")

    def lock_ahead(self) -> None:
        """Lock what the memory's owner has filled, and what it will fill, before it is read."""
        address, device = self._mapped.ctypes.data, self._stream.device

        def is_filled(start: int, size_bytes: int) -> bool:
            return filled_share(address + start, size_bytes) >= FILLED_SHARE

        lock_ahead(self, self._regions, is_filled, lambda: torch.cuda.set_device(device))

    def copy(
        self, tile: Tile, sources: Sequence[int], blocks: Sequence[int], check: Check | None = None
    ) -> Pending[str | None]:
        for source, block in zip(sources, blocks, strict=True):
            self._regions.lock_at(source * self._block_bytes)
            if not self._copy_rows(tile, self._mapped[source, tile.first_layer].ctypes.data, block):
                return _Copied(self._stream.record_event(), self, lambda: NOT_COPIED)
        if check is None:
            return _Copied(self._stream.record_event(), self, lambda: None)
        tags = TagsInProgress(self._bytes, blocks, check.keyed)
        return _Copied(self._stream.record_event(), self, lambda: check.refusal(tags.result()))

    def _copy_rows(self, tile: Tile, address: int, block: int) -> bool:
        """Queue copies of a block's layers, which lie at this address one after the other. Returns whether that went
        well.
        """
        statuses, inside = [], 0
        for plane in self._planes:
            statuses += plane.copy(tile, address + inside, self._piece_bytes, block, self._stream.cuda_stream)
            inside += plane.piece_bytes
        failed = [status for status in statuses if status != driver.CUresult.CUDA_SUCCESS]
        if failed:
            _log.warning("a store's block was not copied", extra={"fields": {"status": failed[0].name}})
        return not failed


class _Plane:
    """A part of each block of the pool."""

    def __init__(self, plane: torch.Tensor) -> None:
        self._address = plane.data_ptr()
        self._blocks = plane.shape[1]
        self.piece_bytes = plane[0, 0].numel() * plane.itemsize

    def copy(self, tile: Tile, address: int, pitch: int, block: int, stream: int) -> list[driver.CUresult]:
        """Queue a copy of rows to the tile's layers of a block. pitch: bytes from a row to the next."""
        layer_bytes = self._blocks * self.piece_bytes
        target = self._address + tile.first_layer * layer_bytes + block * self.piece_bytes
        if layer_bytes > MOST_PITCH:
            places = ((target + layer * layer_bytes, address + layer * pitch) for layer in range(tile.layer_count))
            return [driver.cuMemcpyHtoDAsync(*place, self.piece_bytes, stream)[0] for place in places]
        rows = driver.CUDA_MEMCPY2D()
        rows.srcMemoryType, rows.srcHost, rows.srcPitch = driver.CUmemorytype.CU_MEMORYTYPE_HOST, address, pitch
        rows.dstMemoryType, rows.dstDevice = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE, target
        rows.dstPitch, rows.WidthInBytes, rows.Height = layer_bytes, self.piece_bytes, tile.layer_count
        return [driver.cuMemcpy2DAsync(rows, stream)[0]]


class _PageLocks:
    """Parts of some memory that CUDA has page-locked. Neither ends before the other.

    Attributes:
        starts: of these parts.
        status: of the last call.
    """

    def __init__(self, mapped: Pool) -> None:
        self._mapped = mapped
        self._address = mapped.ctypes.data
        self.starts: list[int] = []
        self.status = driver.CUresult.CUDA_SUCCESS

    def lock(self, start: int, size_bytes: int) -> None:
        # CUDA would find them one by one, and keep the launches of other threads waiting meanwhile.
        enter_pages(self._address + start, size_bytes)
        (self.status,) = driver.cuMemHostRegister(self._address + start, size_bytes, 0)
        if self.status == driver.CUresult.CUDA_SUCCESS:
            self.starts.append(start)

    def __del__(self) -> None:
        for start in self.starts:
            driver.cuMemHostUnregister(self._address + start)


class _Copied:
    """A `transfer.memory.Pending`."""

    def __init__(self, done: torch.cuda.Event, read: object, refusal: Callable[[], str | None]) -> None:
        """read: what keeps the memory that is read, until the copies have completed; refusal: the result then."""
        self._done = done
        self._read = read
        self._refusal = refusal

    @property
    def completed(self) -> bool:
        completed: bool = self._done.query()
        return completed

    def result(self) -> str | None:
        self._done.synchronize()
        return self._refusal()


def _region_bytes(block_bytes: int) -> int:
    """A size of regions of which each begins with a page and a block: CUDA copies no range that lies in two."""
    whole = math.lcm(block_bytes, mmap.PAGESIZE)
    return whole * max(1, REGION_BYTES // whole)

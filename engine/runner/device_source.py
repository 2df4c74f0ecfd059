"""Memory that another process shares, as a GPU copies from it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from cuda.bindings import driver

from engine.runner.locked_regions import LockedRegions
from transfer.checksum import Bytes
from transfer.memory import Run

if TYPE_CHECKING:
    from engine.runner.device_memory import DeviceSlot

# Each is locked by a call that the transfer thread waits for. A multiple of all pages' sizes.
REGION_BYTES = 64 << 20


class DeviceSource:
    """A `transfer.memory.HostSource`: copies are queued on one stream, and use no processor."""

    def __init__(self, mapped: Bytes, stream: torch.cuda.Stream) -> None:
        """mapped: memory whose pages can be written, although nothing here writes them. Raises OSError if CUDA cannot
        page-lock it.
        """
        self._address = mapped.ctypes.data
        self._stream = stream
        # They are given back when the last reference to the source goes, so they must not refer to it.
        locks = _PageLocks(mapped)
        self._regions = LockedRegions(len(mapped), locks.lock, REGION_BYTES)
        self._regions.lock(0)
        if not locks.starts:
            raise OSError(f"CUDA cannot page-lock it ({locks.status.name})")

    def stage(self, runs: Sequence[Run], staging: "DeviceSlot") -> "_Staging":
        target, error = staging.tensor.data_ptr(), None
        for run in runs:
            for part in self._regions.split(run):
                (status,) = driver.cuMemcpyHtoDAsync(
                    target + part.place, self._address + part.start, part.size_bytes, self._stream.cuda_stream
                )
                if status != driver.CUresult.CUDA_SUCCESS:
                    error = f"the GPU cannot copy it ({status.name})"
        staging.done.record(self._stream)
        return _Staging(staging, self, error)


class _PageLocks:
    """Parts of some memory that CUDA has page-locked. Neither ends before the other.

    Attributes:
        starts: of these parts.
        status: of the last call.
    """

    def __init__(self, mapped: Bytes) -> None:
        self._mapped = mapped
        self._address = mapped.ctypes.data
        self.starts: list[int] = []
        self.status = driver.CUresult.CUDA_SUCCESS

    def lock(self, start: int, size_bytes: int) -> None:
        (self.status,) = driver.cuMemHostRegister(self._address + start, size_bytes, 0)
        if self.status == driver.CUresult.CUDA_SUCCESS:
            self.starts.append(start)

    def __del__(self) -> None:
        for start in self.starts:
            driver.cuMemHostUnregister(self._address + start)


class _Staging:
    """A `transfer.transport.Transmission`."""

    def __init__(self, slot: "DeviceSlot", source: DeviceSource, error: str | None) -> None:
        self._slot = slot
        # Its memory stays until the copy has completed.
        self._source = source
        self._error = error

    @property
    def completed(self) -> bool:
        completed: bool = self._slot.done.query()
        return completed

    def error(self) -> str | None:
        return self._error

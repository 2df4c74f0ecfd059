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
        self._mapped = mapped
        self._address = mapped.ctypes.data
        self._stream = stream
        self._locked: list[int] = []
        self._status = driver.CUresult.CUDA_SUCCESS
        self._regions = LockedRegions(len(mapped), self._lock, REGION_BYTES)
        self._regions.lock(0)
        if not self._locked:
            raise OSError(f"CUDA cannot page-lock it ({self._status.name})")

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

    def _lock(self, start: int, size_bytes: int) -> None:
        (self._status,) = driver.cuMemHostRegister(self._address + start, size_bytes, 0)
        if self._status == driver.CUresult.CUDA_SUCCESS:
            self._locked.append(start)

    def __del__(self) -> None:
        for start in getattr(self, "_locked", ()):
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

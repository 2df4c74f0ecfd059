"""Memory of each rank's GPU that the other ranks' kernels read and write."""

import ctypes
from typing import Any

import torch
from cuda.bindings import driver

from engine.exchange.host import HostExchange
from engine.parallel.layout import Group
from kernels.peer_exchange.region import Members, State, region_bytes, word_bytes
from mesh.errors import EngineFailed

_STATE_BYTES = 4096
# Size of a CUipcMemHandle.
_HANDLE_BYTES = 64
_GROUPS = (Group.WORLD, Group.TP)
_UNREACHABLE = (
    "map the memory of another rank's GPU: the GPUs of a worker must reach each other over NVLink or PCIe"
    " (nvidia-smi topo -p2p r)"
)


class PeerMemory:
    """One rank's buffer, and where it has mapped the others'. A buffer holds a state and a region for each group.

    Plain memory from the driver: torch's cannot be mapped by another process. It lives as long as the process.
    """

    def __init__(self, host: HostExchange, device: torch.device) -> None:
        """Called by all ranks at once. Raises EngineFailed, on all of them, if a GPU lacks the memory or cannot reach
        another's; and RankLost.
        """
        self._place = host.place
        self._device = device
        # 0, or 1 + the number of a rank for which a kernel has waited in vain. A kernel writes it; the host reads it
        # without waiting.
        self._lost = torch.zeros(1, dtype=torch.int32).pin_memory()
        # Torch makes the context that the driver's calls need.
        torch.cuda.current_stream(device).synchronize()
        with torch.cuda.device(device):
            own, handle = self._allocate(host)
            self._bases = self._map_all(host, own, handle)

    def members(self, group: Group) -> ctypes.Structure:
        """For kernels of this rank that exchange with the group."""
        ranks = self._place.members(group)
        members = Members(state=self._bases[self._place.rank], lost=self._lost.data_ptr())
        members.ranks, members.own, members.first = len(ranks), ranks.index(self._place.rank), ranks.start
        for index, rank in enumerate(ranks):
            members.regions[index] = self._bases[rank] + self._offset(group)
        return members

    @property
    def lost(self) -> int | None:
        """A rank for which a kernel has waited in vain."""
        written = int(self._lost[0])
        return written - 1 if written else None

    def limit(self, seconds: float) -> None:
        """How long kernels wait for another rank. Waits until the device has nothing to do."""
        nanoseconds = ctypes.c_uint64(int(seconds * 1e9))
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            place = self._bases[self._place.rank] + State.nanoseconds.offset
            _check(driver.cuMemcpyHtoD(place, ctypes.addressof(nanoseconds), ctypes.sizeof(nanoseconds)))

    def renew(self, host: HostExchange) -> None:
        """Make the memory as it was at first, for the same ranks. Called by all of them at once. Raises RankLost."""
        self._place = host.place
        torch.cuda.synchronize(self._device)
        # No kernel of another rank writes any more, and none writes yet.
        host.barrier(Group.WORLD)
        with torch.cuda.device(self._device):
            self._clear(self._bases[self._place.rank])
        self._lost.zero_()
        host.barrier(Group.WORLD)

    @property
    def _size(self) -> int:
        return self._offset(Group.TP) + region_bytes(len(self._place.members(Group.TP)))

    def _clear(self, address: int) -> None:
        _check(driver.cuMemsetD8(address, 0, self._size))
        for group in _GROUPS:
            words = word_bytes(len(self._place.members(group)))
            if words.stop:
                start = address + self._offset(group) + words.start
                _check(driver.cuMemsetD8(start, 0xFF, words.stop - words.start))
        torch.cuda.synchronize(self._device)

    def _offset(self, group: Group) -> int:
        before = _GROUPS[: _GROUPS.index(group)]
        return _STATE_BYTES + sum(region_bytes(len(self._place.members(each))) for each in before)

    def _allocate(self, host: HostExchange) -> tuple[int, bytes]:
        """The address of this rank's buffer, as kernels expect it, and a handle of it for other processes."""
        size = self._size
        handle = driver.CUipcMemHandle()
        status, address = driver.cuMemAlloc(size)
        if not status:
            # Before another rank can write to it.
            self._clear(int(address))
            status, handle = driver.cuIpcGetMemHandle(address)
        agree(host, status, f"give {size} bytes that other GPUs can map")
        return int(address), ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def _map_all(self, host: HostExchange, own: int, handle: bytes) -> list[int]:
        """The address of each rank's buffer in this process."""
        handles = host.all_gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8)[None], Group.WORLD)
        bases, status = [own] * len(handles), driver.CUresult.CUDA_SUCCESS
        for rank, theirs in enumerate(handles):
            if rank != self._place.rank and not status:
                opened = driver.CUipcMemHandle()
                ctypes.memmove(opened.getPtr(), theirs.data_ptr(), _HANDLE_BYTES)
                flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
                status, bases[rank] = driver.cuIpcOpenMemHandle(opened, flags)
        agree(host, status, _UNREACHABLE)
        return [int(base) for base in bases]


def agree(host: HostExchange, status: driver.CUresult, act: str) -> None:
    """Raises EngineFailed on all ranks if one of them could not `act`; status: what this one's driver answered."""
    statuses = host.all_gather(torch.tensor([int(status)]), Group.WORLD).tolist()
    for rank, each in enumerate(statuses):
        if each:
            raise EngineFailed(f"the GPU of rank {rank} cannot {act} ({driver.CUresult(each).name})")


def _check(result: Any) -> None:
    (status,) = result
    if status:
        raise EngineFailed(f"CUDA answers {status.name}")

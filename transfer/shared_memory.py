"""Memory of one process that other processes of its host may map, and read without a copy on the way.

It is an anonymous file (memfd): no name in a file system, no limit of a container's /dev/shm, and nothing is left when
the last process that maps it has ended. Others open it through the owner's /proc entry, so they must see the owner's
process number and be allowed to read the owner's memory: on one machine, processes of one user.
"""

import fcntl
import mmap
import os
import secrets
from contextlib import suppress

import msgspec
import numpy as np

from transfer.origin import own_origin

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_PREFIX = "deepmesh-kv-"
_NAME_BYTES = 16
# If it could shrink, whoever reads it could die of a SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemoryHandle(msgspec.Struct, frozen=True, array_like=True):
    """Where another process finds the memory."""

    # The kernel's boot id.
    host: str
    process_id: int
    descriptor: int
    # Random, so that a process of another PID namespace with the same number is not mistaken for the owner.
    name: str
    size_bytes: int


class SharedMemory:
    """`array` is uint8, page-aligned, zeroed. The machine provides its pages when they are first written."""

    def __init__(self, size_bytes: int) -> None:
        name = _PREFIX + secrets.token_hex(_NAME_BYTES)
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, size_bytes)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._file, size_bytes)
        except BaseException:
            os.close(self._file)
            raise
        # Where the kernel has them for such memory: /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise".
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: Bytes = np.frombuffer(self._map, np.uint8)
        origin = own_origin()
        self.handle: MemoryHandle | None = None
        if origin is not None:
            self.handle = MemoryHandle(origin.host, os.getpid(), self._file, name, size_bytes)

    def __del__(self) -> None:
        # The mapping stays as long as arrays use it.
        if hasattr(self, "_map"):
            os.close(self._file)


def map_memory(handle: MemoryHandle, *, writable: bool = False) -> Bytes:
    """The memory until the array is dropped, which is read-only. writable: whether its pages are not.

    Raises OSError if it is another host's, if it is gone, or if this process may not read it.
    """
    origin = own_origin()
    if origin is None or origin.host != handle.host:
        raise OSError("it is on another host")
    path = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
    if not handle.name.startswith(_PREFIX) or not os.readlink(path).startswith(f"/memfd:{handle.name} "):
        raise FileNotFoundError(f"process {handle.process_id} is another one here: PID namespaces differ")
    file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != handle.size_bytes:
            raise OSError("it has another size")
        if not handle.size_bytes:
            raise OSError("it is empty")
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("its owner could shrink it")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapped = np.frombuffer(mmap.mmap(file, handle.size_bytes, prot=protection), np.uint8)
        mapped.flags.writeable = False
        return mapped
    finally:
        os.close(file)

"""Host memory that the ranks of a worker share. Locks on it tell each rank which others have ended."""

import fcntl
import mmap
import os
import struct

# struct flock with 64-bit offsets: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
# The memory begins with a byte for each rank: 0 until it joins.
HEADER_BYTES = mmap.PAGESIZE
_JOINED, _GAVE_UP = 1, 2


def create_memory(size_bytes: int) -> int:
    """A descriptor of new memory, all zeros. Pages take physical memory once they are touched."""
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, size_bytes)
    return descriptor


class GroupMemory:
    """One rank's map of the memory. Every rank locks a byte of it, which the kernel unlocks when its process ends."""

    def __init__(self, descriptor: int, rank: int) -> None:
        """descriptor: what `create_memory` gave; it may be closed afterwards."""
        # The lock belongs to the open file description, which no child inherits.
        self._rank = rank
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self.map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock_of(rank))
        self.map[rank] = _JOINED

    def has_ended(self, rank: int) -> bool:
        """Whether a rank that was there has closed its memory, or died."""
        if not self.map[rank]:
            return False
        found, *_ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock_of(rank)))
        return bool(found == fcntl.F_UNLCK)

    def give_up(self) -> None:
        """Tell the others that this rank goes on without what it waits for."""
        self.map[self._rank] = _GAVE_UP

    def has_given_up(self, rank: int) -> bool:
        return self.map[rank] == _GAVE_UP

    def close(self) -> None:
        """Leave, so that no rank waits for this one. The map stays as long as objects refer to it."""
        # The map has a descriptor of its own, which would keep the lock.
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock_of(self._rank, fcntl.F_UNLCK))
        os.close(self._file)


def _lock_of(rank: int, kind: int = fcntl.F_WRLCK) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, rank, 1, 0)

"""POSIX semaphores in memory that processes share: to sleep until another process posts. Needs glibc 2.30."""

import ctypes
import errno
import mmap
import time

# Each has cache lines of its own; glibc's takes 32 bytes.
SEMAPHORE_BYTES = 128


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """`count` of them, from `offset` of the map on."""

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        # Keeps the memory mapped.
        self._base = ctypes.c_char.from_buffer(memory, offset)
        first = ctypes.addressof(self._base)
        self._addresses = [ctypes.c_void_p(first + index * SEMAPHORE_BYTES) for index in range(count)]
        self._libc = ctypes.CDLL(None, use_errno=True)
        # These return at once. If the interpreter's lock were released for them, another thread could keep it for
        # milliseconds.
        at_once = ctypes.PyDLL(None, use_errno=True)
        self._post, self._try_take = at_once.sem_post, at_once.sem_trywait

    def create(self) -> None:
        """Called once, by the process that makes the memory."""
        for address in self._addresses:
            self._check(self._libc.sem_init(address, 1, 0))

    def post(self, index: int) -> None:
        """Also makes what this process has written before visible to the process that takes the post."""
        if self._post(self._addresses[index]):
            self._check(-1)

    def try_take(self, index: int) -> bool:
        """Take one post if there is one."""
        return not self._try_take(self._addresses[index])

    def take(self, index: int, seconds: float) -> bool:
        """Take one post; sleep until there is one. Returns False if there is none for about this many seconds."""
        address = self._addresses[index]
        nanoseconds = time.monotonic_ns() + int(seconds * 1e9)
        until = _Timespec(*divmod(nanoseconds, 10**9))
        # Not sem_timedwait: it would sleep for longer if the machine's time is set back meanwhile.
        if self._libc.sem_clockwait(address, time.CLOCK_MONOTONIC, ctypes.byref(until)) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            self._check(-1)
        return False

    def _check(self, status: int) -> None:
        if status != 0:
            raise OSError(ctypes.get_errno(), "semaphore")

"""Pages that another process fills: whether it has, and how they enter this process's page table many at a time."""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# From <linux/mman.h>, since Linux 5.14.
_MADV_POPULATE_READ = 22
# The kernel lets as many enter pages at once.
_THREADS = 4


def enter_pages(address: int, size_bytes: int) -> None:
    """Enter this memory's pages, as far as the kernel does it: what uses a page that is not entered waits for a fault.

    address: a multiple of a page.
    """
    libc = ctypes.CDLL(None)
    part = -(-size_bytes // (_THREADS * mmap.PAGESIZE)) * mmap.PAGESIZE

    def enter(start: int) -> None:
        length = ctypes.c_size_t(min(part, size_bytes - start))
        libc.madvise(ctypes.c_void_p(address + start), length, ctypes.c_int(_MADV_POPULATE_READ))

    with ThreadPoolExecutor(_THREADS, "mapped-pages") as threads:
        # Each call lets other threads of Python run.
        list(threads.map(enter, range(0, size_bytes, part)))


def filled_share(address: int, size_bytes: int) -> float:
    """The share of this memory's pages that are there already, which may be another process's doing. 0 if the kernel
    does not tell. address: a multiple of a page.
    """
    pages = np.zeros(-(-size_bytes // mmap.PAGESIZE), np.uint8)
    asked = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_void_p(pages.ctypes.data)
    )
    return float((pages & 1).mean()) if asked == 0 else 0.0

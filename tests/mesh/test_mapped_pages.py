import mmap
import os
import platform
import resource

import numpy as np
import pytest

from mesh.mapped_pages import enter_pages

PAGES = 5000


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs Linux 5.14")
def test_entered_pages_are_read_without_faults() -> None:
    file, size = os.memfd_create("filled"), PAGES * mmap.PAGESIZE
    try:
        os.ftruncate(file, size)
        np.frombuffer(mmap.mmap(file, size), np.uint8)[:] = 7
        mapped = np.frombuffer(mmap.mmap(file, size), np.uint8)
    finally:
        os.close(file)
    enter_pages(mapped.ctypes.data, size)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert mapped[:: mmap.PAGESIZE].min() == 7
    # Else there is one for each few pages that the kernel enters by itself.
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < PAGES // 100

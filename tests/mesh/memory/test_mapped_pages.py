import mmap
import os
import platform
import resource
from typing import Any

import numpy as np
import pytest

from mesh.memory.mapped_pages import enter_pages, filled_share

PAGES = 5000
SIZE = PAGES * mmap.PAGESIZE


def mapped_twice() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Memory as two processes have it."""
    file = os.memfd_create("filled")
    try:
        os.ftruncate(file, SIZE)
        first, second = (np.frombuffer(mmap.mmap(file, SIZE), np.uint8) for _ in range(2))
        return first, second
    finally:
        os.close(file)


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs Linux 5.14")
def test_entered_pages_are_read_without_faults() -> None:
    written, mapped = mapped_twice()
    written[:] = 7
    enter_pages(mapped.ctypes.data, SIZE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert mapped[:: mmap.PAGESIZE].min() == 7
    # Else there is one for each few pages that the kernel enters by itself.
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < PAGES // 100


def test_pages_are_there_once_another_mapping_wrote_them() -> None:
    written, read = mapped_twice()
    written[: SIZE // 4] = 7
    assert filled_share(read.ctypes.data, SIZE) == 0.25
    assert filled_share(read.ctypes.data, SIZE // 4) == 1.0
    written[:] = 7
    assert filled_share(read.ctypes.data, SIZE) == 1.0

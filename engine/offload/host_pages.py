"""Page-locked host memory, from which a GPU copies without the processor."""

import mmap

import torch

from mesh.errors import EngineFailed
from mesh.huge_pages import huge_memory


class HostPages:
    """Host memory, page-locked if a GPU is to copy from it. Torch's own page-locked memory comes in powers of two,
    which would take half as much again.

    Attributes:
        tensor: [bytes] uint8.
    """

    def __init__(self, size_bytes: int, *, page_locked: bool) -> None:
        self._locked = False
        # Small pages would be locked one by one, which takes minutes for a model.
        self.tensor = torch.frombuffer(huge_memory(size_bytes), dtype=torch.uint8)
        if page_locked:
            # All of torch's threads touch the pages in parallel; the driver would have one thread zero them.
            self.tensor[:: mmap.PAGESIZE].zero_()
            status = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size_bytes, 0)
            if int(status):
                raise EngineFailed(
                    f"CUDA cannot page-lock {size_bytes / 1e9:.1f} GB of host memory ({status}): lower"
                    " engine.offload.layers if it is set, or give the worker more memory"
                )
            self._locked = True

    def __del__(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())

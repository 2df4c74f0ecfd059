"""Page-locked host memory, from which a GPU copies without the processor."""

import logging
import mmap

import torch

from mesh.errors import EngineFailed
from mesh.memory.huge_pages import huge_memory
from mesh.memory.memory_node import prefer_node

_log = logging.getLogger("deepmesh.engine")


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
            lock_pages(self.tensor)
            self._locked = True

    def __del__(self) -> None:
        if self._locked:
            unlock_pages(self.tensor)


def lock_pages(memory: torch.Tensor) -> None:
    """Have the machine give the pages, and lock them. memory: [bytes] uint8, from the start of a page on. Raises
    EngineFailed.
    """
    # All of torch's threads touch the pages in parallel; the driver would have one thread zero them.
    memory[:: mmap.PAGESIZE].zero_()
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)
    if int(status):
        raise EngineFailed(
            f"CUDA cannot page-lock {len(memory) / 1e9:.1f} GB of host memory ({status}): lower"
            " engine.offload.layers if it is set, or give the worker more memory"
        )


def unlock_pages(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def prefer_near(memory: torch.Tensor, node: int) -> None:
    """Have pages that are not there yet come from this node of the machine's memory, as far as the kernel obeys."""
    try:
        prefer_node(memory.data_ptr(), len(memory), node)
    except OSError as error:
        fields = {"node": node, "why": str(error)}
        _log.info("host memory may be far from its GPU: the kernel takes no wish", extra={"fields": fields})

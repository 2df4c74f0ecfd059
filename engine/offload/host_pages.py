"""Page-locked host memory, from which a GPU copies without the processor."""

import logging
import mmap
import time
from collections.abc import Callable

import torch

from mesh.errors import EngineFailed
from mesh.huge_pages import huge_memory
from mesh.memory_node import prefer_node

_log = logging.getLogger("deepmesh.engine")

# What is touched before it is known how fast the machine gives memory.
FIRST_BYTES = 64 << 20


class HostPages:
    """Host memory, page-locked if a GPU is to copy from it. Torch's own page-locked memory comes in powers of two,
    which would take half as much again.

    Attributes:
        tensor: [bytes] uint8.
    """

    def __init__(
        self, size_bytes: int, *, page_locked: bool, seconds: float | None = None, node: int | None = None
    ) -> None:
        """seconds: about how long it may take to lock them; fewer bytes are locked if the machine is too slow, and the
        tensor has only those. node: of the machine's memory, which gives pages while it has some and the kernel obeys.
        """
        self._locked = False
        # Small pages would be locked one by one, which takes minutes for a model.
        self.tensor = torch.frombuffer(huge_memory(size_bytes), dtype=torch.uint8)
        if node is not None:
            _prefer(self.tensor, node)
        if page_locked:
            # All of torch's threads touch the pages in parallel; the driver would have one thread zero them.
            if seconds is None:
                _touch(self.tensor)
            else:
                # Pages that are there are locked about as fast as they were touched, or faster.
                self.tensor = self.tensor[: touched(_touch, self.tensor, seconds / 2)]
            size_bytes = len(self.tensor)
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


def touched(
    touch: Callable[[torch.Tensor], None],
    memory: torch.Tensor,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Touch memory from its start for no longer than `seconds`, if it comes as fast later as at first. Returns how many
    bytes were.
    """
    began, done, end = clock(), 0, min(FIRST_BYTES, len(memory))
    while done < len(memory):
        touch(memory[done:end])
        done, end = end, min(2 * end, len(memory))
        # The next part is as large as all before it.
        if clock() - began > seconds / 2:
            break
    return done


def _prefer(memory: torch.Tensor, node: int) -> None:
    try:
        prefer_node(memory.data_ptr(), len(memory), node)
    except OSError as error:
        fields = {"node": node, "why": str(error)}
        _log.info("host memory may be far from its GPU: the kernel takes no wish", extra={"fields": fields})


def _touch(memory: torch.Tensor) -> None:
    """Have the machine give the pages."""
    memory[:: mmap.PAGESIZE].zero_()

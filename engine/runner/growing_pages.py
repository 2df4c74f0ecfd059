"""Page-locked host memory that grows while it is in use: a machine may lock pages slowly, and no start waits for it."""

import logging
import math
import mmap
import time
import weakref
from collections.abc import Callable
from threading import Event, Thread

import torch

from engine.offload.host_pages import lock_pages, prefer_near, unlock_pages
from mesh.errors import EngineFailed
from mesh.memory.huge_pages import huge_memory

_log = logging.getLogger("deepmesh.engine")

# What is locked at a time: few milliseconds, in which the driver may keep a step's launches waiting.
PART_BYTES = 64 << 20

Lock = Callable[[torch.Tensor], None]


class GrowingPages:
    """A thread takes and locks the memory in parts, from its start to its end or until a part cannot be locked.

    Attributes:
        tensor: [bytes] uint8, all of it.
    """

    def __init__(
        self, size_bytes: int, unit_bytes: int, node: int | None, lock: Lock = lock_pages, unlock: Lock = unlock_pages
    ) -> None:
        """unit_bytes: what lies in one part, since CUDA copies no range that lies in two; node: of the machine's
        memory, which gives pages while it has some and the kernel obeys; lock: raises EngineFailed, in the thread.
        Raises OSError if the system grants no such memory.
        """
        self.tensor = torch.frombuffer(huge_memory(size_bytes), dtype=torch.uint8)
        if node is not None:
            prefer_near(self.tensor, node)
        # Parts must begin with a page.
        unit_bytes = math.lcm(unit_bytes, mmap.PAGESIZE)
        growth = self._growth = _Growth(self.tensor, max(PART_BYTES // unit_bytes, 1) * unit_bytes, lock)
        thread = Thread(target=growth.run, name="host-pages", daemon=True)
        thread.start()
        # The thread does not refer to this object, so it ends when this one goes, or with the process.
        weakref.finalize(self, _end, growth, thread, unlock)

    @property
    def locked_bytes(self) -> int:
        """How many of the first bytes are locked: only ever more."""
        return self._growth.locked_bytes


class _Growth:
    def __init__(self, memory: torch.Tensor, part_bytes: int, lock: Lock) -> None:
        self.parts = memory.split(part_bytes)
        self.locked: list[torch.Tensor] = []
        # Written by the thread, for all others.
        self.locked_bytes = 0
        self.ended = Event()
        self._lock = lock

    def run(self) -> None:
        began, why = time.monotonic(), None
        for part in self.parts:
            if self.ended.is_set():
                return
            try:
                self._lock(part)
            except EngineFailed as error:
                why = error.message
                break
            self.locked.append(part)
            self.locked_bytes += len(part)
        fields = {"size": f"{self.locked_bytes / 1e9:,.1f} GB", "seconds": f"{time.monotonic() - began:.2f}"}
        if why is None:
            _log.info("host memory is page-locked", extra={"fields": fields})
            return
        message = "no more host memory is page-locked: lower engine.host_blocks, or free memory"
        _log.warning(message, extra={"fields": fields | {"why": why}})


def _end(growth: _Growth, thread: Thread, unlock: Lock) -> None:
    growth.ended.set()
    thread.join()
    for part in growth.locked:
        unlock(part)

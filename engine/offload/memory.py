"""Where offloaded layers' experts lie: all of them in host memory, those in use in slots on the device."""

import logging
import math
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engine.offload.host_pages import HostPages

_log = logging.getLogger("deepmesh.engine")

# Every tensor begins at a multiple of this. Tensor maps need 16, and wide loads no more.
ALIGNMENT = 1024
# More than any layer's experts take.
_MOST_BYTES = 1 << 50


class SlotMemory:
    """An `engine.offload.ring.Copies`. On a CPU slots are host memory too, and copies are done at once."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pages: dict[int, HostPages] = {}
        # Layers that have no pages yet, in the order in which they are kept; and the pages of the next one, which a
        # thread makes meanwhile: page-locking takes as long as reading.
        self._expected: deque[int] = deque()
        self._coming: Future[HostPages] | None = None
        self._waited_seconds = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-pages")
        self._slots: list[torch.Tensor | None] = [None] * slots
        self._copied: list[torch.cuda.Event | None] = [None] * slots

    def expect(self, layer: int) -> None:
        """Announce that the layer will be kept, after those that are announced already."""
        self._expected.append(layer)

    def slot(self, number: int, size_bytes: int) -> torch.Tensor:
        """[bytes] uint8, the same for all layers that share the slot: their experts are of one size."""
        memory = self._slots[number]
        if memory is None:
            memory = self._slots[number] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        assert len(memory) == size_bytes
        return memory

    @property
    def host_bytes(self) -> int:
        """Host memory of all layers together."""
        return sum(len(pages.tensor) for pages in self._pages.values())

    def start(self, layer: int, slot: int) -> None:
        memory = self._slots[slot]
        assert memory is not None
        if self._stream is None:
            memory.copy_(self._pages[layer].tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            memory.copy_(self._pages[layer].tensor, non_blocking=True)
        self._copied[slot] = self._stream.record_event()

    def wait(self, slot: int) -> None:
        copied = self._copied[slot]
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)

    def keep(self, layer: int, slot: int) -> None:
        """Copy what is in the slot to host memory of the layer's own, once, after loading. The host waits for it.

        Raises EngineFailed if the memory cannot be page-locked.
        """
        memory = self._slots[slot]
        assert memory is not None and layer == self._expected.popleft()
        started = time.monotonic()
        coming = self._coming or self._make_pages(memory)
        self._pages[layer] = pages = coming.result()
        self._waited_seconds += time.monotonic() - started
        self._coming = self._make_pages(memory) if self._expected else None
        pages.tensor.copy_(memory)
        if self._coming is None:
            fields = {"gb": round(self.host_bytes / 1e9, 1), "waited_for_memory_s": round(self._waited_seconds, 1)}
            _log.info("experts are in host memory", extra={"fields": fields})

    def _make_pages(self, slot: torch.Tensor) -> Future[HostPages]:
        return self._thread.submit(_pages_for, slot)


class Room:
    """One piece of memory for all tensors of a layer's experts, so that one copy moves them all.

    A NewTensor of formats: cuts tensors from its memory, one after another. The same shapes asked for in the same
    order lie at the same places of each room.
    """

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype) -> None:
        """memory: [bytes] uint8; dtype: of tensors by default."""
        self._memory = memory
        self._dtype = dtype
        self.used_bytes = 0

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or self._dtype
        size = math.prod(shape) * dtype.itemsize
        part = self._memory[self.used_bytes : self.used_bytes + size]
        assert len(part) == size, "the room was measured for fewer tensors"
        self.used_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return part.view(dtype).view(shape)


def endless_room(dtype: torch.dtype) -> Room:
    """A room without memory, to measure how much would be used."""
    return Room(torch.empty(_MOST_BYTES, dtype=torch.uint8, device="meta"), dtype)


def _pages_for(slot: torch.Tensor) -> HostPages:
    """Runs in a thread."""
    if slot.is_cuda:
        torch.cuda.set_device(slot.device)
    return HostPages(len(slot), page_locked=slot.is_cuda)

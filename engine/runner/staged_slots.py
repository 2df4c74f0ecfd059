"""Slots of page-locked host memory for the blocks of a pool on a GPU."""

from collections.abc import Iterator, Sequence

import torch

from engine.memory.memory_plan import host_staged_blocks
from engine.offload.host_pages import HostPages
from engine.runner.growing_pages import GrowingPages
from kernels.host_copy import to_indices
from kernels.kv_copy.words import as_words
from mesh.errors import EngineFailed
from transfer.memory import Done, Pending


class StagedSlots:
    """An `engine.moves.host_slots.HostSlots` that grows, as far as its memory is page-locked. Blocks lie scattered over
    the pool's layers, so they are gathered on the GPU first, several at a time; each block then crosses the link in one
    copy.

    All of that is queued on a stream of its own, in the order of the calls. The host alone orders it with the engine's
    stream: it has blocks copied that no step in flight writes, and waits for a copy before it gives a block to others.
    On a CPU, where the pool is in host memory too, copies are done at once.
    """

    def __init__(self, planes: Sequence[torch.Tensor], count: int) -> None:
        """planes: of the pool, [layers, blocks, ...] contiguous, with a multiple of 8 bytes of a block in a layer;
        count: of blocks in the end. Raises MemoryError or EngineFailed if there is no memory.
        """
        assert all(pool.is_contiguous() for pool in planes)
        # [blocks, layers, words] each, of int64, because not every operation takes one-byte floats.
        self._planes = [plane.transpose(0, 1) for plane in as_words(planes)]
        self._device = planes[0].device
        self.completes_later = planes[0].is_cuda
        words = [plane[0].numel() for plane in self._planes]
        block_bytes = self._block_bytes = 8 * sum(words)
        try:
            self._staging = self._planes[0].new_empty((host_staged_blocks(block_bytes), sum(words)))
        except torch.OutOfMemoryError as error:
            raise EngineFailed("the GPU has no room for copies to host memory: lower engine.total_blocks") from error
        try:
            self._pages = _pages(count, block_bytes, self._device)
        except OSError as error:
            raise MemoryError(str(error)) from error
        # A block in a slot, or in staging, is all layers of the first plane, then those of the next.
        self._slots = self._pages.tensor.view(torch.int64).view(count, sum(words))
        # By plane, its part of staging: [blocks, layers, words].
        self._staged = [
            part.unflatten(1, plane.shape[1:])
            for part, plane in zip(self._staging.split(words, dim=1), self._planes, strict=True)
        ]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def count(self) -> int:
        if isinstance(self._pages, GrowingPages):
            return self._pages.locked_bytes // self._block_bytes
        return len(self._slots)

    @torch.inference_mode()
    def write(self, blocks: Sequence[int], slots: Sequence[int]) -> Pending[None]:
        if self._stream is None:
            self._write(blocks, slots)
            return Done(None)
        with torch.cuda.stream(self._stream):
            self._write(blocks, slots)
            return _Written(self._stream.record_event(torch.cuda.Event(blocking=True)))

    @torch.inference_mode()
    def read(self, slots: Sequence[int], blocks: Sequence[int]) -> Pending[float]:
        if self._stream is None:
            self._read(slots, blocks)
            return Done(0.0)
        with torch.cuda.stream(self._stream):
            began = self._stream.record_event(torch.cuda.Event(enable_timing=True))
            self._read(slots, blocks)
            return _Read(began, self._stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True)))

    def _write(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for staging, blocks_part, slots_part in self._parts(blocks, slots):
            ids = to_indices(blocks_part, self._device)
            for plane, staged in zip(self._planes, self._staged, strict=True):
                torch.index_select(plane, 0, ids, out=staged[: len(ids)])
            for staged, slot in zip(staging, slots_part, strict=True):
                self._slots[slot].copy_(staged, non_blocking=True)

    def _read(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for staging, slots_part, blocks_part in self._parts(slots, blocks):
            for staged, slot in zip(staging, slots_part, strict=True):
                staged.copy_(self._slots[slot], non_blocking=True)
            ids = to_indices(blocks_part, self._device)
            for plane, whole in zip(self._planes, self._staged, strict=True):
                plane.index_copy_(0, ids, whole[: len(ids)])

    def _parts(
        self, first: Sequence[int], second: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, Sequence[int], Sequence[int]]]:
        """As many of both as the staging buffer takes at a time, each with its place there."""
        assert len(first) == len(second)
        size = len(self._staging)
        for start in range(0, len(first), size):
            part = first[start : start + size]
            yield self._staging[: len(part)], part, second[start : start + size]


def _pages(count: int, block_bytes: int, device: torch.device) -> GrowingPages | HostPages:
    if device.type != "cuda":
        return HostPages(count * block_bytes, page_locked=False)
    # Imported only here: it needs CUDA's bindings.
    from engine.runner.device_node import node_of_gpu

    return GrowingPages(count * block_bytes, block_bytes, node_of_gpu(device.index))


class _Queued:
    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    @property
    def completed(self) -> bool:
        return bool(self._done.query())


class _Written(_Queued):
    def result(self) -> None:
        self._done.synchronize()


class _Read(_Queued):
    def __init__(self, began: torch.cuda.Event, done: torch.cuda.Event) -> None:
        super().__init__(done)
        self._began = began

    def result(self) -> float:
        self._done.synchronize()
        return float(self._began.elapsed_time(self._done)) / 1000

"""Blocks that another process may change while they are read: each is copied to memory of this process's own, checked
there, and copied to the GPU's pool from there.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import BoundedSemaphore
from typing import NamedTuple

import numpy as np
import torch

from engine.offload.host_pages import HostPages
from transfer.landing import NOT_COPIED
from transfer.memory import Check
from transfer.segments import Tile

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
# Queues a copy of a block's layers, which lie at this address one after the other, to a block of the pool. Returns
# whether that went well.
QueueCopy = Callable[[Tile, int, int], bool]

# Copying and checking a block takes a processor 18 times as long as the link takes to copy it (H200, PCIe 5). Both
# calls release the interpreter lock. A copy is one call; a check is one for each layer, and more checks at a time than
# these only wait for that lock.
THREADS = 4
CHECKS = 2


class _Outcome(NamedTuple):
    """Why a block must not be used, and the event after its copy."""

    refusal: str | None
    copied: torch.cuda.Event


class CheckedBlocks:
    """Threads copy and check, a block each."""

    def __init__(
        self, layers: int, piece_bytes: int, queue_copy: QueueCopy, stream: torch.cuda.Stream, device: torch.device
    ) -> None:
        """layers, piece_bytes: of the largest block; queue_copy: called from any thread, it queues on the stream;
        device: of the pool. Raises EngineFailed if a GPU's memory cannot be page-locked.
        """
        self._queue_copy = queue_copy
        self._stream = stream
        on_gpu = device.type == "cuda"
        self._pages = HostPages(THREADS * layers * piece_bytes, page_locked=on_gpu)
        # Each thread takes a room that none has, with the event after which the GPU does not read it any more.
        self._rooms: SimpleQueue[tuple[Rows, torch.cuda.Event | None]] = SimpleQueue()
        for rows in self._pages.tensor.view(THREADS, layers, piece_bytes).numpy():
            self._rooms.put((rows, None))
        self._turns = BoundedSemaphore(CHECKS)
        self._threads = ThreadPoolExecutor(
            THREADS, "checked-blocks", initializer=partial(torch.cuda.set_device, device) if on_gpu else None
        )

    def copy(self, tile: Tile, found: Sequence[Rows], blocks: Sequence[int], check: Check) -> "_Checking":
        """See `transfer.memory.HostSource`. found: the tile's layers of each block, [layer_count, piece_bytes]."""
        numbered = enumerate(zip(found, blocks, strict=True))
        return _Checking(
            [self._threads.submit(self._copy, tile, check, number, *each) for number, each in numbered], self
        )

    def _copy(self, tile: Tile, check: Check, number: int, found: Rows, block: int) -> _Outcome:
        """Runs in a thread."""
        room, read = self._rooms.get()
        try:
            if read is not None:
                read.synchronize()
            own = room[: tile.layer_count]
            own[:] = found
            with self._turns:
                refusal = check(number, partial(_pieces, own))
            if refusal is None and not self._queue_copy(tile, own.ctypes.data, block):
                refusal = NOT_COPIED
            read = self._stream.record_event()
            return _Outcome(refusal, read)
        finally:
            self._rooms.put((room, read))


class _Checking:
    """A `transfer.memory.Pending`."""

    def __init__(self, blocks: Sequence[Future[_Outcome]], read: object) -> None:
        """read: what keeps the memory that the GPU reads, until the copies have completed."""
        self._blocks = blocks
        self._read = read

    @property
    def completed(self) -> bool:
        return all(block.done() for block in self._blocks) and all(
            block.result().copied.query() for block in self._blocks
        )

    def result(self) -> str | None:
        outcomes = [block.result() for block in self._blocks]
        for outcome in outcomes:
            outcome.copied.synchronize()
        return next((outcome.refusal for outcome in outcomes if outcome.refusal is not None), None)


def _pieces(rows: Rows) -> list[memoryview]:
    return [row.data for row in rows]

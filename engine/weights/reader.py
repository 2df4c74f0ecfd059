"""Reads parts of files while those before them are converted."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.offload.host_pages import HostPages
from engine.weights.shards import Shards

# Small tensors that lie next to each other are read together, up to this many bytes.
WINDOW_BYTES = 16 << 20
# Gaps of up to this many bytes between two of them are read and thrown away.
GAP_BYTES = 4096
# One thread copies from the page cache slower than a GPU takes it, and a disk is fastest with several requests.
MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a file."""

    path: Path
    offset: int
    size_bytes: int
    # Contiguous memory on the CPU into which they are read; by default a buffer.
    target: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


class Reader:
    """Brings pieces of a checkpoint to a device in order, while threads read the next ones into a few buffers.

    Host memory: one window more than there are threads, page-locked if the device is a GPU; kept for the next read.

    Attributes:
        shards: the files that it reads.
        device: where it brings the bytes.
    """

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self.shards = shards
        self.device = device
        self._threads = min(MOST_THREADS, os.cpu_count() or 1)
        # Buffers into which nothing is being read.
        self._free: deque[_Buffer] = deque()

    def read(self, pieces: Iterable[Piece]) -> Iterator[torch.Tensor]:
        """The bytes of each piece, uint8, on the device, or its target; on a CPU they are there until the next is
        asked for. Pieces are asked for ahead of time. Raises CheckpointError if a file has become shorter.
        """
        under_way: deque[_Window] = deque()
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="weights")
        try:
            for members in _windows(pieces):
                under_way.append(self._begin(members, pool))
                if len(under_way) > self._threads:
                    yield from self._bytes_of(under_way.popleft())
            while under_way:
                yield from self._bytes_of(under_way.popleft())
        finally:
            pool.shutdown(cancel_futures=True)
            self._free.extend(window.buffer for window in under_way if window.buffer is not None)

    def _begin(self, members: list[Piece], pool: ThreadPoolExecutor) -> "_Window":
        if members[0].target is not None:
            return _Window(members, None, pool.submit(self._read, members, members[0].target, None))
        size = members[-1].end - members[0].offset
        buffer = self._free.popleft() if self._free else None
        if buffer is None or len(buffer.memory) < size:
            buffer = _Buffer(max(size, WINDOW_BYTES), page_locked=self.device.type == "cuda")
        return _Window(members, buffer, pool.submit(self._read, members, buffer.memory, buffer))

    def _read(self, members: list[Piece], memory: torch.Tensor, buffer: "_Buffer | None") -> None:
        """Runs in a thread."""
        if buffer is not None:
            buffer.wait()
        size = members[-1].end - members[0].offset
        self.shards.read(members[0].path, members[0].offset, memory[:size].numpy().data.cast("B"))

    def _bytes_of(self, window: "_Window") -> Iterator[torch.Tensor]:
        window.read.result()
        first, buffer = window.members[0], window.buffer
        if buffer is None:
            assert first.target is not None
            yield first.target
            return
        memory = buffer.memory[: window.members[-1].end - first.offset]
        try:
            if self.device.type == "cuda":
                memory = buffer.copied_to(self.device, len(memory))
            for piece in window.members:
                yield memory[piece.offset - first.offset : piece.end - first.offset]
        finally:
            self._free.append(buffer)


class _Buffer:
    """Memory on the host, [bytes] uint8."""

    def __init__(self, size_bytes: int, *, page_locked: bool) -> None:
        # The last copy to a GPU.
        self._copied = torch.cuda.Event() if page_locked else None
        # Referred to as long as the tensor that lies in it is used.
        self._pages = HostPages(size_bytes, page_locked=page_locked)
        self.memory = self._pages.tensor

    def copied_to(self, device: torch.device, size_bytes: int) -> torch.Tensor:
        """The first bytes on a GPU; the copy follows what its stream has been given so far."""
        assert self._copied is not None
        copy = self.memory[:size_bytes].to(device, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(device))
        return copy

    def wait(self) -> None:
        """Wait until the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def __del__(self) -> None:
        self.wait()


@dataclass(frozen=True, slots=True)
class _Window:
    """Pieces that lie next to each other, and the buffer into which they are read."""

    members: list[Piece]
    buffer: _Buffer | None
    read: Future[None]


def _windows(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups of pieces that are read together. A piece with a target is alone."""
    members: list[Piece] = []
    for piece in pieces:
        if members and not _continues(members, piece):
            yield members
            members = []
        members.append(piece)
    if members:
        yield members


def _continues(members: list[Piece], piece: Piece) -> bool:
    first, last = members[0], members[-1]
    together = first.target is None and piece.target is None and piece.path == first.path
    return together and last.end <= piece.offset <= last.end + GAP_BYTES and piece.end - first.offset <= WINDOW_BYTES

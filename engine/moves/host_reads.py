"""Requests that wait for a part of their prefix from host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.blocks.kv_pool import BlockPool
from engine.moves.host_tier import HostTier
from engine.requests.request import Request
from mesh.blocks import BLOCK_TOKENS
from mesh.observe.spans import span
from transfer.memory import Pending


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    request: Request
    contents: Sequence[bytes]
    blocks: Sequence[int]
    copy: Pending[float]
    move: span


class HostReads:
    """Holds every read's blocks in the pool until the copy has completed, even if the request ends first."""

    def __init__(self, tier: HostTier, pool: BlockPool) -> None:
        self._tier = tier
        self._pool = pool
        self._open: list[_Read] = []
        # Requests whose reads have completed.
        self._done: list[Request] = []

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def awaited(self) -> int:
        return sum(not read.request.ended for read in self._open)

    @property
    def arriving(self) -> set[bytes]:
        """The contents that the pool will have when the open reads have completed."""
        return {content for read in self._open for content in read.contents}

    @property
    def done(self) -> bool:
        """Whether `drain` has something without another `poll`."""
        return bool(self._done)

    def begin(self, request: Request, contents: Sequence[bytes]) -> None:
        """Read these contents, which follow the blocks that the request found in the pool and which are pinned for it.
        `drain` has the request once that is done.
        """
        held = request.progress.registered_blocks
        blocks = list(request.progress.block_ids[held : held + len(contents)])
        self._pool.acquire(blocks)
        move = span("engine.read_host", blocks=len(blocks)).begin(request.stages.context)
        self._open.append(_Read(request, contents, blocks, self._tier.begin_read(contents, blocks), move))
        self.poll()

    def poll(self) -> bool:
        """Note which copies have completed. Returns whether any has."""
        completed = [read for read in self._open if read.copy.completed]
        for read in completed:
            self._open.remove(read)
            self._end(read)
        return bool(completed)

    def drain(self) -> list[Request]:
        """Requests that can go on. Some may have ended since."""
        done, self._done = self._done, []
        return done

    def _end(self, read: _Read) -> None:
        self._tier.end_read(read.contents, read.copy.result())
        read.move.end()
        self._pool.release(read.blocks)
        if not read.request.ended:
            progress = read.request.progress
            progress.landed((progress.registered_blocks + len(read.contents)) * BLOCK_TOKENS)
            self._done.append(read.request)

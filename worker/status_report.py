"""What a worker reports to the scheduler: its state, its load, and the blocks that came and went since the last one."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from mesh.domain.workers import TransferCounters, WorkerLoad, WorkerState

# Hashes in one message: 16 bytes each, far below the message limit.
MESSAGE_HASHES = 50_000


@dataclass(frozen=True, slots=True)
class Report:
    """One message's content."""

    state: WorkerState
    load: WorkerLoad
    transfers: TransferCounters
    # `stored` begins the list of all blocks: earlier reports are void.
    snapshot: bool
    stored: list[bytes]
    removed: list[bytes]
    # Nothing comes after it.
    leaving: bool = False


class StatusReport:
    """Collects changes; `next_report` gives what changed since it was last called."""

    def __init__(self, total_blocks: int) -> None:
        self._load = WorkerLoad(free_blocks=total_blocks)
        self._transfers = TransferCounters()
        self._state = WorkerState.SERVING
        # The worker's reusable blocks, in the order in which they came.
        self._blocks: dict[bytes, None] = {}
        # Net changes since the last report: whether the block is there now.
        self._changes: dict[bytes, bool] = {}
        self._changed = asyncio.Event()
        self._leaving = False

    @property
    def load(self) -> WorkerLoad:
        return self._load

    @property
    def transfers(self) -> TransferCounters:
        return self._transfers

    def observe(
        self,
        load: WorkerLoad,
        stored: Iterable[bytes],
        removed: Iterable[bytes],
        transfers: TransferCounters | None = None,
    ) -> None:
        """Note what a step changed: `removed` left before `stored` came. Without `transfers` they are as before."""
        self._load = load
        self._transfers = transfers or self._transfers
        self._remove(removed)
        self._store(stored)
        self._changed.set()

    def drain(self) -> None:
        """The worker takes nothing new from now on."""
        self._set_state(WorkerState.DRAINING)

    def leave(self) -> None:
        """The worker has no request left and ends: the next report is its last."""
        self._leaving = True
        self._changed.set()

    def set_stalled(self, stalled: bool) -> None:
        """Whether a rank makes no progress: the worker takes nothing new meanwhile."""
        if self._state is not WorkerState.DRAINING:
            self._set_state(WorkerState.STALLED if stalled else WorkerState.SERVING)

    def wake(self) -> None:
        """Have `wait` return though nothing changed."""
        self._changed.set()

    async def wait(self, timeout_seconds: float) -> None:
        """Return when there is something to report, or after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()

    def next_report(self, snapshot: bool) -> Report:
        """The changes since the last report, or as many as one message holds: `wait` returns at once for the rest.

        With `snapshot` all blocks are reported again, for a scheduler that knows nothing of this worker.
        """
        if snapshot:
            self._changes = dict.fromkeys(self._blocks, True)
        reported = dict(islice(self._changes.items(), MESSAGE_HASHES))
        for block_hash in reported:
            del self._changes[block_hash]
        if not self._changes:
            self._changed.clear()
        stored = [block_hash for block_hash, present in reported.items() if present]
        removed = [block_hash for block_hash, present in reported.items() if not present]
        return Report(self._state, self._load, self._transfers, snapshot, stored, removed, self._leaving)

    def _set_state(self, state: WorkerState) -> None:
        if state is not self._state:
            self._state = state
            self._changed.set()

    def _store(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            self._blocks[block_hash] = None
            self._change(block_hash, True)

    def _remove(self, block_hashes: Iterable[bytes]) -> None:
        for block_hash in block_hashes:
            self._blocks.pop(block_hash, None)
            self._change(block_hash, False)

    def _change(self, block_hash: bytes, present: bool) -> None:
        # A block that came and went between two reports is not reported, and must not pile up without a scheduler.
        if self._changes.get(block_hash, present) is present:
            self._changes[block_hash] = present
        else:
            del self._changes[block_hash]

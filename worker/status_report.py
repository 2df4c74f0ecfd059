"""A worker's reports to the scheduler: its state, its load, and the blocks added and removed since the last report."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from mesh.domain.workers import MAX_RANKS, HostTierStatus, RankStatus, TransferCounters, WorkerLoad, WorkerState

# Most hashes in one message: 16 bytes each, far below the message limit.
MESSAGE_HASHES = 50_000


@dataclass(frozen=True, slots=True)
class Report:
    """The content of one message."""

    state: WorkerState
    load: WorkerLoad
    transfers: TransferCounters
    # Whether `stored` begins a list of all blocks, so that earlier reports are void.
    snapshot: bool
    stored: list[bytes]
    removed: list[bytes]
    # If the worker has several ranks, or keeps blocks in host memory: for each of `stored` a bit mask of the ranks that
    # hold it, in the pool or in host memory (see mesh.domain.workers.POOL_BITS).
    holders: list[int]
    # Each rank's own report, if there are several.
    ranks: Sequence[RankStatus]
    # Whether this is the last report.
    leaving: bool = False


class StatusReport:
    """Collects changes; `next_report` returns the changes since its last call."""

    def __init__(
        self, total_blocks: int, ranks: Sequence[RankStatus] = (), host_tier: HostTierStatus | None = None
    ) -> None:
        """ranks: the first report of each rank, if there are several; host_tier: of all of them."""
        self._load = WorkerLoad(free_blocks=total_blocks, host_tier=host_tier)
        self._transfers = TransferCounters()
        self._ranks = ranks
        self._state = WorkerState.SERVING
        # Reusable blocks in the order in which they were added, each with a bit mask of the ranks that hold it.
        self._holders: dict[bytes, int] = {}
        # Net changes since the last report: for each changed block, the ranks that held it at that report.
        self._changes: dict[bytes, int] = {}
        self._changed = asyncio.Event()
        self._leaving = False
        self._followers: list[StatusReport] = []

    def follower(self) -> "StatusReport":
        """Another reader of the same changes: each scheduler gets the changes since its own last report."""
        follower = StatusReport(0)
        follower._load, follower._transfers, follower._state = self._load, self._transfers, self._state
        follower._ranks = self._ranks
        for block_hash, holders in self._holders.items():
            follower._hold(block_hash, holders)
        self._followers.append(follower)
        return follower

    @property
    def load(self) -> WorkerLoad:
        return self._load

    @property
    def transfers(self) -> TransferCounters:
        return self._transfers

    def observe(
        self,
        load: WorkerLoad,
        stored: Collection[bytes],
        removed: Collection[bytes],
        transfers: TransferCounters | None = None,
        rank: int = 0,
        ranks: Sequence[RankStatus] = (),
        hosted: Collection[bytes] = (),
        unhosted: Collection[bytes] = (),
    ) -> None:
        """Note the changes of a rank's step: blocks in `removed` left its pool before those in `stored` were added, and
        so for its host memory with `unhosted` and `hosted`.

        load, transfers: of all ranks together; None leaves the transfers as they were. ranks: each rank's report, if
        there are several.
        """
        self._load = load
        self._transfers = transfers or self._transfers
        self._ranks = ranks
        for bit, went, came in ((rank, removed, stored), (MAX_RANKS + rank, unhosted, hosted)):
            for block_hash in went:
                self._hold(block_hash, self._holders.get(block_hash, 0) & ~(1 << bit))
            for block_hash in came:
                self._hold(block_hash, self._holders.get(block_hash, 0) | 1 << bit)
        self._changed.set()
        for follower in self._followers:
            follower.observe(load, stored, removed, transfers, rank, ranks, hosted, unhosted)

    def drain(self) -> None:
        """From now on the worker takes nothing new."""
        self._set_state(WorkerState.DRAINING)

    def leave(self) -> None:
        """The worker has no request left and stops: the next report is its last."""
        self._leaving = True
        self._changed.set()

    def set_stalled(self, stalled: bool) -> None:
        """Note whether a rank makes no progress; meanwhile the worker takes nothing new."""
        if self._state is not WorkerState.DRAINING:
            self._set_state(WorkerState.STALLED if stalled else WorkerState.SERVING)

    def wake(self) -> None:
        """Have `wait` return although nothing changed."""
        self._changed.set()

    async def wait(self, timeout_seconds: float) -> None:
        """Return once there is something to report, or after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()

    def next_report(self, snapshot: bool) -> Report:
        """The changes since the last report, or as many as fit into one message; `wait` then returns at once for the
        rest.

        With `snapshot`, all blocks are reported again, for a scheduler that knows nothing of this worker.
        """
        if snapshot:
            self._changes = dict.fromkeys(self._holders, 0)
        reported = dict(islice(self._changes.items(), MESSAGE_HASHES))
        for block_hash in reported:
            del self._changes[block_hash]
        if not self._changes:
            self._changed.clear()
        stored = [block_hash for block_hash in reported if block_hash in self._holders]
        removed = [block_hash for block_hash in reported if block_hash not in self._holders]
        needs_masks = self._ranks or self._load.host_tier is not None
        return Report(
            state=self._state,
            load=self._load,
            transfers=self._transfers,
            snapshot=snapshot,
            stored=stored,
            removed=removed,
            holders=[self._holders[block_hash] for block_hash in stored] if needs_masks else [],
            ranks=self._ranks,
            leaving=self._leaving,
        )

    def _set_state(self, state: WorkerState) -> None:
        if state is not self._state:
            self._state = state
            self._changed.set()
        for follower in self._followers:
            follower._set_state(state)

    def _hold(self, block_hash: bytes, holders: int) -> None:
        before = self._holders.get(block_hash, 0)
        if holders:
            self._holders[block_hash] = holders
        else:
            self._holders.pop(block_hash, None)
        # A block that was added and removed between two reports is not reported. Such blocks must not pile up without a
        # scheduler.
        if self._changes.setdefault(block_hash, before) == holders:
            del self._changes[block_hash]

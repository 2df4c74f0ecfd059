"""A worker's ranks as one: a request goes to the best rank, messages are merged, and the end of one rank ends all, or
all but those that keep their weights.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Self

from engine.config import EngineConfig
from engine.parallel.layout import Layout
from engine.protocol.messages import FirstToken, StepResult, Submit, TransferNews
from mesh.config import ObserveConfig
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.workers import RankStatus, TransferCounters, WorkerLoad
from mesh.errors import EngineFailed
from mesh.processes.exit_status import describe_status
from mesh.rank_choice import choose_rank
from transfer.block_macs import Authorship
from worker.chains import found_blocks
from worker.events.block_tokens import BlockTokens
from worker.handover import KeptRanks
from worker.hosts.joined import JoinedHosts
from worker.merging import merge_loads, merge_ready, merge_transfers
from worker.ranks.client import STOP_GRACE_SECONDS, RankClient
from worker.ranks.loss import release_all, settle_loss
from worker.ranks.start import adopted_ranks, started_ranks
from worker.ranks.view import RankView
from worker.watchdog import END_SECONDS, STALLED_SECONDS, Watchdog, blamed

# How often heartbeats are checked.
WATCH_SECONDS = 0.05

RankMessage = StepResult | TransferNews


class RankGroup:
    """Made by `start`, in the main thread, or by `adopt`. The worker's keys of requests also encode the rank.

    Every method that sends raises EngineFailed once a rank has died.

    Attributes:
        processes: clients of all ranks, in order.
        ranks: clients of the ranks that take requests: the first rank of each TP group.
        views: the state of each of those ranks, as far as it is known.
        ready: the descriptions of the ranks after loading, merged.
        stalled: whether a rank has made no progress for a while; see `worker.watchdog`.
        kept: this host's ranks, for `adopt`, once another host was lost and they have left their group; else None.
    """

    def __init__(self, processes: Sequence[RankClient], tp: int = 1, hosts: JoinedHosts | None = None) -> None:
        """processes: all ranks of the worker, in order; tp: how many neighbouring ranks compute a request together;
        hosts: the worker's other hosts, if there are any.
        """
        self.processes = processes
        self._hosts = hosts
        self.kept: KeptRanks | None = None
        self._tp = tp
        self.ranks = ranks = processes[::tp]
        self.views = [RankView(rank.ready) for rank in ranks]
        self.ready = merge_ready([rank.ready for rank in ranks], [rank.name for rank in ranks])
        self.stalled = False
        self._requests_a_rank = min(rank.ready.max_requests for rank in ranks)
        self._named_requests = 0
        self._failure: EngineFailed | None = None
        self._released = False
        # Set once this host is to part from the others although no rank was lost.
        self._parting = asyncio.Event()
        # Learns the tokens of requests, if somebody is told of blocks.
        self.tokens: BlockTokens | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        observe: ObserveConfig | None = None,
        authorship: Authorship | None = None,
        hosts: JoinedHosts | None = None,
    ) -> Self:
        """Start the worker's ranks and return once all have loaded. Raises what RankClient.start raises, after ending
        all ranks.

        hosts: the worker's other hosts, if there are any; all must have joined.
        """
        async with started_ranks(config, observe, authorship, hosts) as processes:
            return cls(processes, Layout.of(config.parallel).tp, hosts)

    @classmethod
    async def adopt(
        cls,
        kept: KeptRanks,
        config: EngineConfig,
        observe: ObserveConfig | None = None,
        authorship: Authorship | None = None,
        hosts: JoinedHosts | None = None,
    ) -> Self:
        """Take over the released ranks of a worker, or of its first host, and return once all ranks are ready. Raises
        what RankClient.adopt raises, after ending all ranks.

        hosts: as for `start`.
        """
        async with adopted_ranks(kept, config, observe, authorship, hosts) as processes:
            return cls(processes, Layout.of(config.parallel).tp, hosts)

    @property
    def load(self) -> WorkerLoad:
        return merge_loads([view.load for view in self.views])

    @property
    def transfers(self) -> TransferCounters:
        return merge_transfers([view.transfers for view in self.views])

    @property
    def statuses(self) -> list[RankStatus]:
        """The report of each rank; empty for a single rank, whose report is the worker's own."""
        return [view.status for view in self.views] if len(self.views) > 1 else []

    def new_key(
        self,
        token_ids: Sequence[int],
        cache_salt: bytes,
        computes_prompt: bool,
        sparse: SparsePrefill | None = None,
        booked: int | None = None,
    ) -> int:
        """A key for a request that will be submitted next. It belongs to the rank that suits the request best.

        `computes_prompt` is False if another worker computes the prompt. booked: see `choose_rank`.
        """
        rank = self._choose(token_ids, cache_salt, computes_prompt, sparse, booked)
        key = self._named_requests * len(self.ranks) + rank
        self._named_requests += 1
        return key

    def rank_of(self, key: int) -> int:
        """The rank that has, or had, the request with that key."""
        return key % len(self.ranks)

    def submit(self, submit: Submit) -> None:
        self._client(submit.key).submit(submit)
        # A single rank is not chosen by its work, so its outputs need not be counted.
        if len(self.ranks) > 1:
            self.views[self.rank_of(submit.key)].submitted(submit)
        if self.tokens is not None:
            self.tokens.submitted(submit.key, submit.request)

    def cancel(self, key: int) -> None:
        self._client(key).cancel(key)

    def first_token(self, first: FirstToken) -> None:
        self._client(first.key).first_token(first)
        if self.tokens is not None:
            self.tokens.followed(first.key, first.token_id)

    async def run(self, on_message: Callable[[int, RankMessage], None]) -> EngineFailed:
        """Call `on_message` with rank and message, for each message, in each rank's order, until a rank is lost.

        If a rank dies or makes no progress, kill all ranks of its host, let the other hosts go, and return why. This
        host's ranks are killed too if they cannot be kept. If it is not known which rank hangs, each host finds out
        whether its own do. Call it once, and promptly: a rank whose results are not read pauses after some MB.
        """
        tasks: list[asyncio.Task[tuple[int | None, EngineFailed]]]
        tasks = [asyncio.create_task(self._read(number, on_message)) for number in range(len(self.processes))]
        tasks += [asyncio.create_task(self._watch()), asyncio.create_task(self._until_parting())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            number, self._failure = next(task.result() for task in tasks if task in done)
            self.kept = await settle_loss(self.processes, self._hosts, number)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._failure

    async def until_host_stops(self) -> None:
        """Return once another host of the worker has been told to stop; never if it has no other."""
        stopping = asyncio.Event() if self._hosts is None else self._hosts.stopping
        await stopping.wait()

    def part(self) -> None:
        """Have `run` let all other hosts go, and keep this host's ranks."""
        self._parting.set()

    async def release(self) -> KeptRanks:
        """Have all ranks forget all but their weights; `run` must continue until then. Afterwards this group no longer
        owns them.

        Raises EngineFailed if one ends instead.
        """
        kept = KeptRanks(await release_all(self.processes))
        self._released = True
        return kept

    async def close(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Stop all ranks, by force after the grace. May be called twice. Their requests are lost. Released ranks are
        left alone.
        """
        if self._released or self.kept is not None:
            return
        await asyncio.gather(*(process.close(grace_seconds) for process in self.processes))

    def _choose(
        self,
        token_ids: Sequence[int],
        cache_salt: bytes,
        computes_prompt: bool,
        sparse: SparsePrefill | None,
        booked: int | None,
    ) -> int:
        if len(self.ranks) == 1:
            return 0
        found = found_blocks(token_ids, cache_salt, self.views, sparse)
        outlooks = [view.outlook(blocks) for view, blocks in zip(self.views, found, strict=True)]
        return choose_rank(outlooks, len(token_ids), computes_prompt, self._requests_a_rank, booked)

    def _client(self, key: int) -> RankClient:
        if self._failure is not None:
            raise EngineFailed(self._failure.message)
        return self.ranks[self.rank_of(key)]

    async def _read(
        self, number: int, on_message: Callable[[int, RankMessage], None]
    ) -> tuple[int | None, EngineFailed]:
        """Read a process's messages until it dies; returns its number, and why it died. Only the first process of a TP
        group sends messages.
        """
        client, rank = self.processes[number], number // self._tp
        view = self.views[rank]
        try:
            async for message in client.results:
                if self._failure is not None:
                    # After a loss steps may be made of what a rank did not get.
                    continue
                if isinstance(message, StepResult):
                    view.observe(message)
                on_message(rank, message)
        except EngineFailed as error:
            return number, error
        status = await asyncio.shield(client.closed)
        return number, EngineFailed(f"{client.name} ended with {describe_status(status)}")

    async def _until_parting(self) -> tuple[int | None, EngineFailed]:
        await self._parting.wait()
        return None, EngineFailed("a host of the worker was told to stop")

    async def _watch(self) -> tuple[int | None, EngineFailed]:
        """Watch the heartbeats; returns a rank's number, if it is known which holds up the others, and why, once one
        hangs.
        """
        watchdogs = [Watchdog() for _ in self.processes]
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            # If this process was stopped meanwhile, the ranks may have been stopped too, so that time proves nothing.
            elapsed, last = min(now - last, 4 * WATCH_SECONDS), now
            stalls = [
                watchdog.observe(process.progress(), elapsed)
                for watchdog, process in zip(watchdogs, self.processes, strict=True)
            ]
            longest = max(stalls, key=lambda stall: stall.seconds)
            self.stalled = longest.seconds >= STALLED_SECONDS
            if longest.seconds >= END_SECONDS:
                number = blamed(stalls, min(STALLED_SECONDS, END_SECONDS))
                shown = stalls.index(longest) if number is None else number
                name, cause = self.processes[shown].name, stalls[shown].cause
                if number is None and len(stalls) > 1:
                    cause += ", or waits for another rank's"
                return number, EngineFailed(f"{name} has made no progress for {END_SECONDS:g} s: {cause}")

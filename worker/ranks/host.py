"""A worker's ranks as its service keeps them: passes their state on to the scheduler, the KV stores and the metrics."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol, Self

from msgspec import structs

from engine.balance.report import BalanceReport
from engine.protocol.messages import Ready, StepResult, TransferNews
from kvstore.client import StoreClient
from kvstore.store_user import StoreUser
from mesh.background import background
from mesh.domain.workers import WorkerIdentity, WorkerLoad, WorkerRole
from mesh.errors import EngineFailed, MeshError, WorkerDraining
from mesh.rpc.channel import Channels
from mesh.start_times import process_seconds
from transfer.events import PushEnded
from worker.config import WorkerConfig
from worker.events.kv_events import KvEvents
from worker.handover import Handover, KeptRanks
from worker.hosts.fewer import on_hosts
from worker.hosts.joined import JoinedHosts
from worker.identity import worker_identity
from worker.ranks.group import RankGroup, RankMessage
from worker.ranks.local_tcp import LocalTcpWarning
from worker.ranks.rank_metrics import RankMetrics
from worker.ranks.stores import RankStores, Stores
from worker.status_report import StatusReport

_log = logging.getLogger("deepmesh.worker")

# How often gauges are set and deadlines are checked.
TICK_SECONDS = 0.02


class RankUser(Protocol):
    """A service that handles the messages of its ranks."""

    def on_step(self, result: StepResult) -> None: ...

    def on_news(self, news: TransferNews) -> None:
        """Gets all news except the end of an offer to a store."""
        ...

    def on_tick(self) -> None:
        """Called every few milliseconds."""
        ...


class RankHost:
    """The part that both kinds of worker share. `run` reads the ranks until one dies; to stop, call `drain` and
    `close`.

    Attributes:
        draining: whether the worker takes nothing new.
        stores: the client of the KV stores for each rank.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        ranks: RankGroup,
        connect: Callable[[int, StoreUser], Stores],
        events: KvEvents | None = None,
    ) -> None:
        """`connect` makes a rank's client of the stores; events: tells others which blocks the ranks hold."""
        self.identity = identity
        self.events = events
        ranks.tokens = None if events is None else events.tokens
        self.ranks = ranks
        self.report = StatusReport(ranks.ready.total_blocks, ranks.statuses, ranks.load.host_tier)
        self.draining = False
        self._metrics = RankMetrics()
        self._local_tcp_warning = LocalTcpWarning()
        # None until a rank reports one; none does if experts do not move.
        self._balance: BalanceReport | None = None
        self.stores = [
            RankStores(client, view.chains, partial(connect, rank))
            for rank, (client, view) in enumerate(zip(ranks.ranks, ranks.views, strict=True))
        ]

    @classmethod
    async def start(
        cls,
        config: WorkerConfig,
        role: WorkerRole,
        endpoint: str,
        channels: Channels,
        can_prefill: bool = True,
        handover: Handover | None = None,
        hosts: JoinedHosts | None = None,
    ) -> Self:
        """Start the ranks and return once they have loaded, or take over those that a worker left when it changed its
        role.

        `config`: settled (worker.settled); `endpoint`: host:port of the worker's services; `channels`: for the stores;
        `hosts`: the worker's other hosts, if it has several. Raises as RankClient.start does.
        """
        service_seconds = _seconds_since_begin(handover)
        others = hosts if config.engine.parallel.hosts > 1 else None
        config, group = await _loaded(config, endpoint, None if handover is None else handover.kept, others)
        seconds = _seconds_since_begin(handover)
        _log_start({"service": service_seconds, **group.ready.start_seconds, "all": seconds})
        if handover is not None:
            what = "the worker has changed its role" if others is None else "the worker has formed again"
            _log.info(what, extra={"fields": {"role": role.value, "seconds": round(seconds, 3)}})
        return cls.of(group, config, role, endpoint, channels, can_prefill)

    @classmethod
    def of(
        cls,
        ranks: RankGroup,
        config: WorkerConfig,
        role: WorkerRole,
        endpoint: str,
        channels: Channels,
        can_prefill: bool = True,
    ) -> Self:
        """The host of ranks that have loaded."""
        identity = worker_identity(
            ranks.ready,
            role,
            config.worker_id or endpoint,
            uuid.uuid4().hex,
            endpoint,
            config.engine,
            can_prefill,
        )
        events = KvEvents(config.kv_events, len(ranks.ranks)) if config.kv_events.enabled else None
        stores = config.stores
        return cls(identity, ranks, lambda rank, user: StoreClient(stores, identity, user, channels, rank), events)

    @property
    def ready(self) -> Ready:
        return self.ranks.ready

    def check_takes_new(self) -> None:
        """Raises WorkerDraining if the worker takes nothing new."""
        if self.draining:
            raise WorkerDraining("this worker is draining: place the request on another")

    async def drain(self, idle: asyncio.Event, seconds: float) -> None:
        """Take nothing new, tell the scheduler, and return once `idle` is set, or after `seconds`."""
        self._stop_taking()
        await wait_for(idle, seconds)

    async def close(self) -> None:
        """Stop the ranks; their requests are lost."""
        await self.ranks.close()

    async def run(self, user: RankUser) -> EngineFailed:
        """Return why, once a rank has died, or something else that the worker does all the time has failed. From then
        on it takes nothing new.
        """
        try:
            async with background(*(stores.run() for stores in self.stores), self._tick(user)):
                try:
                    return await self.ranks.run(partial(self._on_message, user))
                finally:
                    self._stop_taking()
        except Exception as error:  # noqa: BLE001
            _log.exception("the worker failed")
            return EngineFailed(f"the worker failed: {type(error).__name__}: {error}")

    def _stop_taking(self) -> None:
        self.draining = True
        self.report.drain()

    def _on_message(self, user: RankUser, rank: int, message: RankMessage) -> None:
        if isinstance(message, StepResult):
            user.on_step(message)
            self._observe(rank, message)
        elif not (isinstance(message, PushEnded) and self.stores[rank].push_ended(message)):
            user.on_news(message)

    def _observe(self, rank: int, result: StepResult) -> None:
        self._metrics.count(result)
        if result.balance is not None:
            self._note_balance(result.balance)
        ranks = self.ranks
        self.report.observe(
            self._load,
            result.stored_blocks,
            result.removed_blocks,
            ranks.transfers,
            rank,
            ranks.statuses,
            result.hosted_blocks,
            result.unhosted_blocks,
        )
        if self.events is not None:
            self.events.observe(rank, result)
        self.stores[rank].offer_stored(result.stored_blocks)

    def _note_balance(self, balance: BalanceReport) -> None:
        """All ranks report the same balance, each with its next step that has requests, so the first to report
        counts.
        """
        if self._balance is not None and balance.moved < self._balance.moved:
            # This rank's report is older than another's.
            return
        self._balance = balance
        self._metrics.show_balance(balance)

    @property
    def _load(self) -> WorkerLoad:
        """The load of all ranks, with figures of the worker as a whole."""
        load, balance = self.ranks.load, self._balance
        if balance is None:
            return load
        return structs.replace(load, expert_imbalance=balance.largest_imbalance, experts_moved=balance.moved)

    async def _tick(self, user: RankUser) -> None:
        while True:
            user.on_tick()
            self.report.set_stalled(self.ranks.stalled)
            self._metrics.show(self.report.load, self.report.transfers, self.ready.total_blocks)
            self._metrics.show_ranks([view.load for view in self.ranks.views])
            self._local_tcp_warning.give(self.report.transfers.local_tcp_bytes)
            for stores in self.stores:
                stores.offer_to_newcomers()
            await asyncio.sleep(TICK_SECONDS)


async def _loaded(
    config: WorkerConfig, endpoint: str, kept: KeptRanks | None, others: JoinedHosts | None
) -> tuple[WorkerConfig, RankGroup]:
    """The worker's ranks once they have loaded, and its configuration on the hosts that they lie on.

    kept: ranks to take over, if there are any. others: the worker's other hosts, if it has several; if ranks of theirs
    do not start, the worker may begin again without them.
    """
    whole = config
    while True:
        if others is not None:
            config = on_hosts(whole, await others.wait())
        told = config.rank_engine, config.observe, config.authorship(endpoint)
        try:
            ranks = RankGroup.start(*told, others) if kept is None else RankGroup.adopt(kept, *told, others)
            return config, await ranks
        except MeshError as error:
            if others is None or not others.begin_again():
                raise
            _log.warning("a host did not start: the worker begins again", extra={"fields": {"cause": str(error)}})
            # They have ended.
            kept = None


def _seconds_since_begin(handover: Handover | None) -> float:
    """Seconds since this process was started, or since it had drained to change its role."""
    return process_seconds() if handover is None else time.monotonic() - handover.drained_at


def _log_start(phases: Mapping[str, float]) -> None:
    """Log how long each phase took until the ranks were ready; `service` is the time before they started."""
    fields = {phase: f"{seconds:.2f}" for phase, seconds in phases.items()}
    _log.info("started, in seconds by phase", extra={"fields": fields})


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Return once the event is set, or after `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()

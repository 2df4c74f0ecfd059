"""A rank as its service keeps it: what the scheduler, the KV stores and the metrics hear of it."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from engine.protocol.messages import Ready, StepResult, TransferNews
from mesh import metrics
from mesh.errors import EngineFailed
from transfer.events import PushEnded
from transfer.ticket import StoreSession, Ticket
from worker.chains import Chains
from worker.rank_client import RankClient
from worker.status_report import StatusReport

# What a store that comes, or comes back, is offered of what the rank has already.
MAX_OFFERED_AGAIN = 256
# How often figures are set, and deadlines looked at.
TICK_SECONDS = 0.02


class Stores(Protocol):
    """The KV stores, as `kvstore.client.StoreClient` has them."""

    @property
    def attached(self) -> list[str]:
        """Ids of those that take offers now."""
        ...

    async def run(self) -> None: ...

    def offer(self, chain: Sequence[bytes]) -> None: ...

    def push_ended(self, event: PushEnded) -> bool: ...


class RankUser(Protocol):
    """What a service does with what its rank says."""

    def on_step(self, result: StepResult) -> None: ...

    def on_news(self, news: TransferNews) -> None:
        """Never of an offer to a store."""
        ...

    def on_tick(self) -> None:
        """Every few milliseconds."""
        ...


class RankHost:
    """`run` follows the rank until it goes. Also what a store's client needs of a rank: see `kvstore.store_user`."""

    def __init__(self, rank: RankClient) -> None:
        self.report = StatusReport(rank.ready.total_blocks)
        self.rank = rank
        # It takes nothing new.
        self.draining = False
        self._chains = Chains()
        # A store came that was offered nothing yet.
        self._store_came = False

    @property
    def ready(self) -> Ready:
        return self.rank.ready

    def drain(self) -> None:
        """Take nothing new, and have the scheduler know."""
        self.draining = True
        self.report.drain()

    async def run(self, user: RankUser, stores: Stores) -> EngineFailed:
        """Drains, and returns why, once the rank has gone."""
        error = await self._follow(user, stores)
        self.drain()
        return error

    async def _follow(self, user: RankUser, stores: Stores) -> EngineFailed:
        tasks = [asyncio.create_task(self._tick(user, stores)), asyncio.create_task(stores.run())]
        try:
            async for said in self.rank.results:
                self._hear(said, user, stores)
        except EngineFailed as error:
            return error
        finally:
            for task in tasks:
                task.cancel()
        status = await asyncio.shield(self.rank.closed)
        return EngineFailed(f"the engine process ended with status {status}")

    def attach_store(self, session: StoreSession) -> None:
        self._store_came = True
        with suppress(EngineFailed):
            self.rank.attach_store(session)

    def detach_store(self, store_id: str) -> None:
        with suppress(EngineFailed):
            self.rank.detach_store(store_id)

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        with suppress(EngineFailed):
            self.rank.push_offer(ticket, hashes)

    def _hear(self, said: StepResult | TransferNews, user: RankUser, stores: Stores) -> None:
        if isinstance(said, StepResult):
            user.on_step(said)
            self._observe(said, stores)
        elif not (isinstance(said, PushEnded) and stores.push_ended(said)):
            user.on_news(said)

    def _observe(self, result: StepResult, stores: Stores) -> None:
        metrics.ENGINE_STEPS.inc()
        self.report.observe(result.load, result.stored_blocks, result.removed_blocks, result.transfers)
        self._chains.observe(result.stored_blocks, result.stored_parents, result.removed_blocks)
        if result.stored_blocks and stores.attached:
            for chain in self._chains.ending_in(result.stored_blocks):
                stores.offer(chain)

    async def _tick(self, user: RankUser, stores: Stores) -> None:
        metrics.ENGINE_BLOCKS_TOTAL.set(self.ready.total_blocks)
        while True:
            user.on_tick()
            self._set_gauges()
            if self._store_came:
                self._store_came = False
                for chain in self._chains.newest(MAX_OFFERED_AGAIN):
                    stores.offer(chain)
            await asyncio.sleep(TICK_SECONDS)

    def _set_gauges(self) -> None:
        load, transfers = self.report.load, self.report.transfers
        metrics.ENGINE_BLOCKS_FREE.set(load.free_blocks)
        metrics.ENGINE_RUNNING.set(load.running_requests)
        metrics.ENGINE_WAITING.set(load.waiting_requests)
        metrics.ENGINE_QUEUED_PREFILL_TOKENS.set(load.queued_prefill_tokens)
        metrics.TRANSFER_OPEN.labels("landing").set(transfers.open_landings)
        metrics.TRANSFER_OPEN.labels("push").set(transfers.open_pushes)
        metrics.TRANSFER_OPEN.labels("fetch").set(transfers.open_fetches)
        metrics.TRANSFER_SLOTS_FREE.set(transfers.free_slots)
        metrics.TRANSFER_SLOTS_QUARANTINED.set(transfers.quarantined_slots)
        for transport, size_bytes in transfers.received_bytes.items():
            metrics.TRANSFER_BYTES.labels("received", transport).set(size_bytes)
        for transport, size_bytes in transfers.sent_bytes.items():
            metrics.TRANSFER_BYTES.labels("sent", transport).set(size_bytes)
        for reason, count in transfers.refused.items():
            metrics.TRANSFER_REFUSED.labels(reason).set(count)

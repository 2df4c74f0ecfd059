"""What a service hears of its rank, and what the scheduler and the stores do."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import psutil

from engine.balance.report import BalanceReport
from engine.protocol.messages import DraftCounts, LandingOpened, StepResult, TransferNews
from mesh.domain.shares import tenant_tag
from mesh.domain.workers import TransferCounters, WorkerLoad, WorkerRole
from mesh.errors import EngineFailed
from mesh.observe import metrics
from mesh.rpc.channel import Channels
from tests.support.engines import oracle_config
from tests.support.fake_rank import TRANSFER_READY, FakeRankClient
from tests.support.forking import forked_services
from tests.support.metric_values import value_of
from tests.support.prefilling import make_ticket
from tests.support.store_agent import worker_identity
from tests.support.waiting import eventually
from transfer.config import TransferConfig
from transfer.events import PushEnded
from transfer.ticket import StoreSession
from worker.config import WorkerConfig
from worker.ranks.group import RankGroup
from worker.ranks.host import RankHost

OFFER, OTHER = bytes(15) + b"1", bytes(15) + b"2"


@dataclass
class RecordingUser:
    steps: list[StepResult] = field(default_factory=list)
    news: list[TransferNews] = field(default_factory=list)
    ticks: int = 0

    def on_step(self, result: StepResult) -> None:
        self.steps.append(result)

    def on_news(self, news: TransferNews) -> None:
        self.news.append(news)

    def on_tick(self) -> None:
        self.ticks += 1


@dataclass
class FakeStores:
    """One store, which has one offer under way: OFFER."""

    attached: list[str] = field(default_factory=lambda: ["store-1"])
    offers: list[list[bytes]] = field(default_factory=list)
    tenants: list[bytes] = field(default_factory=list)
    drafts_ends: list[int | None] = field(default_factory=list)
    heard: list[PushEnded] = field(default_factory=list)
    running: bool = False

    async def run(self) -> None:
        self.running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.running = False

    def offer(self, chain: Sequence[bytes], tenant: bytes, drafts_end: int | None) -> None:
        self.offers.append(list(chain))
        self.tenants.append(tenant)
        self.drafts_ends.append(drafts_end)

    def push_ended(self, event: PushEnded) -> bool:
        self.heard.append(event)
        return event.transfer_id == OFFER


@dataclass
class Hosted:
    host: RankHost
    rank: FakeRankClient
    user: RecordingUser
    stores: FakeStores
    task: "asyncio.Task[EngineFailed]"


@asynccontextmanager
async def hosted() -> AsyncIterator[Hosted]:
    rank, user, stores = FakeRankClient(), RecordingUser(), FakeStores()
    ranks = RankGroup([rank])  # type: ignore[list-item]
    host = RankHost(worker_identity(), ranks, lambda rank, user: stores)
    task = asyncio.create_task(host.run(user))
    yield Hosted(host, rank, user, stores, task)
    if not task.done():
        rank.die()
    await task
    await eventually(lambda: not stores.running)


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def step(stored: list[bytes], parents: list[bytes], removed: list[bytes] | None = None) -> StepResult:
    return StepResult(1, [], WorkerLoad(free_blocks=7), stored, parents, removed or [], TransferCounters(fetches=3))


async def test_a_step_reaches_the_service_and_the_report() -> None:
    async with hosted() as it:
        result = step(hashes(1, 2), [b"", *hashes(1)])
        it.rank.emit(result)
        await eventually(lambda: it.user.steps == [result])
        report = it.host.report.next_report(snapshot=False)
        assert (report.load.free_blocks, report.transfers.fetches, report.stored) == (7, 3, hashes(1, 2))


async def test_metrics_tell_how_full_the_pool_is() -> None:
    async with hosted() as it:
        total = it.host.ready.total_blocks
        for free in (total, total // 4):
            load = WorkerLoad(free_blocks=free)
            it.rank.emit(msgspec.structs.replace(step([], []), load=load))
            await eventually(lambda free=free: value_of(metrics.ENGINE_KV_USAGE) == 1 - free / total)  # type: ignore[misc]


async def test_drafts_are_counted_by_place_and_outcome() -> None:
    def counted(place: int, outcome: str) -> float:
        return value_of(metrics.ENGINE_DRAFTS.labels(place, outcome))

    before = [counted(place, outcome) for place in (1, 2) for outcome in ("accepted", "rejected")]
    async with hosted() as it:
        result = msgspec.structs.replace(step([], []), drafts=DraftCounts([5, 4, 0], [3, 1, 0]))
        it.rank.emit(result)
        await eventually(lambda: it.user.steps == [result])
    after = [counted(place, outcome) for place in (1, 2) for outcome in ("accepted", "rejected")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3, 2, 1, 3]


async def test_blocks_that_fill_are_offered_with_their_whole_chain() -> None:
    async with hosted() as it:
        it.rank.emit(step(hashes(1, 2), [b"", *hashes(1)]), step(hashes(3), hashes(2)), step([], [], hashes(3)))
        await eventually(lambda: len(it.user.steps) == 3)
        assert it.stores.offers == [hashes(1, 2), hashes(1, 2, 3)]


async def test_offers_name_the_tenant_whose_request_began_the_chain() -> None:
    async with hosted() as it:
        began = msgspec.structs.replace(step(hashes(1), [b""]), stored_tenants={hashes(1)[0]: "acme"})
        it.rank.emit(began, step(hashes(2), hashes(1)), step(hashes(3), [b""]))
        await eventually(lambda: len(it.user.steps) == 3)
        assert it.stores.offers == [hashes(1), hashes(1, 2), hashes(3)]
        assert it.stores.tenants == [tenant_tag("acme"), tenant_tag("acme"), b""]
        # What left, and came again for another.
        again = msgspec.structs.replace(step(hashes(1), [b""], hashes(1)), stored_tenants={hashes(1)[0]: "other"})
        it.rank.emit(again)
        await eventually(lambda: it.stores.tenants[3:] == [tenant_tag("other")])


async def test_blocks_without_whole_draft_layers_are_offered_as_such() -> None:
    async with hosted() as it:
        result = msgspec.structs.replace(step(hashes(1, 2), [b"", *hashes(1)]), draftless_blocks=hashes(2))
        it.rank.emit(result)
        await eventually(lambda: it.user.steps == [result])
        assert (it.stores.offers, it.stores.drafts_ends) == ([hashes(1, 2)], [1])


async def test_nothing_is_offered_while_no_store_listens() -> None:
    async with hosted() as it:
        it.stores.attached.clear()
        it.rank.emit(step(hashes(1), [b""]))
        await eventually(lambda: len(it.user.steps) == 1)
        it.stores.attached.append("store-1")
        it.rank.emit(step(hashes(2), hashes(1)))
        await eventually(lambda: it.stores.offers == [hashes(1, 2)])


async def test_a_store_that_comes_is_offered_what_the_rank_has() -> None:
    async with hosted() as it:
        it.stores.attached.clear()
        it.rank.emit(step(hashes(1, 2), [b"", *hashes(1)]), step(hashes(3), hashes(1)), step([], [], hashes(2)))
        await eventually(lambda: len(it.user.steps) == 3)
        it.host.stores[0].attach_store(StoreSession("store-1", "e", b"address", 7, bytes(32), TRANSFER_READY.namespace))
        await eventually(lambda: it.stores.offers == [hashes(1, 3)])
        ticks = it.user.ticks
        await eventually(lambda: it.user.ticks > ticks + 2)
        assert len(it.stores.offers) == 1


async def test_a_worker_reports_which_of_its_ranks_hold_a_block() -> None:
    ranks, user = [FakeRankClient(), FakeRankClient()], RecordingUser()
    stores = [FakeStores(["store-1"]), FakeStores(["store-1"])]
    group = RankGroup(ranks)  # type: ignore[arg-type]
    host = RankHost(worker_identity(), group, lambda rank, user: stores[rank])
    task = asyncio.create_task(host.run(user))
    told = []
    for rank, said in [
        (0, step(hashes(1), [b""])),
        (1, step(hashes(1, 2), [b"", *hashes(1)])),
        (0, step([], [], hashes(1))),
        (1, step([], [], hashes(2, 1))),
    ]:
        ranks[rank].emit(said)
        count = len(user.steps) + 1
        await eventually(lambda count=count: len(user.steps) == count)  # type: ignore[misc]
        report = host.report.next_report(snapshot=False)
        told.append((report.stored, report.holders, report.removed))
    assert told == [
        (hashes(1), [0b01], []),
        (hashes(1, 2), [0b11, 0b10], []),
        (hashes(1), [0b10], []),
        ([], [], hashes(2, 1)),
    ]
    assert [status.cached_blocks for status in report.ranks] == [0, 0]
    # Each rank offers what its own pool has.
    assert [store.offers for store in stores] == [[hashes(1)], [hashes(1, 2)]]
    ranks[0].die()
    await task


async def test_any_rank_with_a_step_tells_experts_balance() -> None:
    def shown() -> tuple[float, float]:
        imbalance = value_of(metrics.ENGINE_EXPERT_IMBALANCE.labels("largest"))
        return imbalance, value_of(metrics.ENGINE_EXPERTS_MOVED)

    ranks, user = [FakeRankClient(), FakeRankClient()], RecordingUser()
    host = RankHost(worker_identity(), RankGroup(ranks), lambda rank, user: FakeStores())  # type: ignore[arg-type]
    task = asyncio.create_task(host.run(user))
    _, moved = shown()
    # The first rank has no request; later it has one, and its news is older.
    for rank, balance in [
        (1, BalanceReport(0.2, 0.5, 3)),
        (1, BalanceReport(0.1, 0.25, 7)),
        (0, BalanceReport(0.2, 0.5, 3)),
    ]:
        ranks[rank].emit(msgspec.structs.replace(step([], []), balance=balance))
        count = len(user.steps) + 1
        await eventually(lambda count=count: len(user.steps) == count)  # type: ignore[misc]
    load = host.report.next_report(snapshot=False).load
    assert (load.expert_imbalance, load.experts_moved) == (0.25, 7)
    assert shown() == (0.25, moved + 7)
    ranks[0].die()
    await task


async def test_a_tick_that_fails_ends_the_worker() -> None:
    class FailingUser(RecordingUser):
        def on_tick(self) -> None:
            raise ValueError("a tick too many")

    host = RankHost(worker_identity(), RankGroup([FakeRankClient()]), lambda rank, user: FakeStores())  # type: ignore[list-item]
    error = await host.run(FailingUser())
    assert str(error) == "the worker failed: ValueError: a tick too many" and host.draining


async def test_the_end_of_an_offer_goes_to_the_stores() -> None:
    async with hosted() as it:
        others: list[TransferNews] = [PushEnded(OTHER, 1, "tcp"), LandingOpened(1, make_ticket(64), 0)]
        it.rank.emit(PushEnded(OFFER, 1, "tcp"), *others)
        await eventually(lambda: it.user.news == others)
        assert len(it.stores.heard) == 2


async def test_what_a_store_asks_for_reaches_the_rank() -> None:
    async with hosted() as it:
        session = StoreSession("store-1", "e", b"address", 7, bytes(32), TRANSFER_READY.namespace)
        ticket = make_ticket(64)
        it.host.stores[0].attach_store(session)
        it.host.stores[0].push_offer(ticket, hashes(1))
        assert (it.rank.attached, it.rank.offered) == ({"store-1": session}, [(ticket, hashes(1))])
        it.host.stores[0].detach_store("store-1")
        assert not it.rank.attached


async def test_the_end_of_the_rank_stops_the_stores() -> None:
    async with hosted() as it:
        await eventually(lambda: it.stores.running and it.user.ticks > 1)
        it.rank.die()
        assert "status 9" in (await it.task).message
        # No service is there to hear it.


async def test_a_rank_listens_for_kv_where_its_service_does() -> None:
    config = WorkerConfig(engine=oracle_config(transfer=TransferConfig()), scheduler="127.0.0.1:1")
    with forked_services():
        host = await RankHost.start(config, WorkerRole.DECODE, "127.0.0.1:1", Channels())
    try:
        connections = psutil.Process(host.ranks.ranks[0].process_id).net_connections("tcp")
        listening = [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]
    finally:
        await host.close()

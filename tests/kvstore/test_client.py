"""A worker's client against stores over gRPC; what the rank would do is done by a fake that pushes no bytes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from typing import Literal, get_args

import pytest

from kvstore.__main__ import running_store
from kvstore.client import StoreClient
from kvstore.offer_link import TOLD_FAILURES
from mesh.blocks import chain_hashes
from mesh.observe.metrics import STORE_OFFERS
from mesh.ports import free_port
from mesh.rendezvous import rendezvous
from mesh.rpc.channel import Channels
from tests.support.metric_values import value_of
from tests.support.store_agent import FakeAgents, worker_identity
from tests.support.stores import store_config
from tests.support.waiting import eventually
from transfer.events import PushEnded
from transfer.ticket import StoreSession, Ticket


def chain(number: int, blocks: int = 6) -> list[bytes]:
    return chain_hashes(range(number, number + 64 * blocks))


def offered_again(client: StoreClient, number: int) -> bool:
    """To be repeated: after a failure a client asks whether the store knows it, and drops what is offered meanwhile."""
    client.offer(chain(number))
    return True


Fault = Literal["the blocks are gone", "the bytes are wrong"]


class FakeRank:
    """Pushes what is offered, at once."""

    def __init__(self, stores: Iterable[FakeAgents]) -> None:
        self._stores = stores
        self.sessions: dict[str, StoreSession] = {}
        self.attached: list[StoreSession] = []
        self.pushed: list[bytes] = []
        self.fault: Fault | None = None
        self.client: StoreClient | None = None

    def attach_store(self, session: StoreSession) -> None:
        self.sessions[session.store_id] = session
        self.attached.append(session)

    def detach_store(self, store_id: str) -> None:
        del self.sessions[store_id]

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        self.pushed += hashes
        asyncio.get_running_loop().call_soon(self._push, ticket)

    def _push(self, ticket: Ticket) -> None:
        assert self.client is not None
        error = self.fault if self.fault == "the blocks are gone" else None
        assert self.client.push_ended(PushEnded(ticket.transfer_id, ticket.size_bytes, "fake", error))
        if error is None:
            self._arrive(ticket.transfer_id)

    def _arrive(self, transfer_id: bytes) -> None:
        opened = (agent for agents in self._stores for agent in agents.opened)
        agent = next(agent for agent in opened if transfer_id in agent.tickets)
        if self.fault is None:
            agent.land(transfer_id)
        else:
            agent.disbelieve(transfer_id)


@asynccontextmanager
async def running_client(stores: Mapping[str, FakeAgents]) -> AsyncIterator[tuple[StoreClient, FakeRank]]:
    """`stores` by endpoint."""
    rank = FakeRank(stores.values())
    client = rank.client = StoreClient(list(stores), worker_identity(), rank, Channels())
    task = asyncio.create_task(client.run())
    yield client, rank
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def attached_client(agents: FakeAgents | None = None) -> AsyncIterator[tuple[StoreClient, FakeRank]]:
    """A client of one running store, and the rank that it serves."""
    agents = agents or FakeAgents()
    async with (
        running_store(store_config(), agents) as server,
        running_client({server.endpoint: agents}) as (client, rank),
    ):
        await eventually(lambda: bool(client.attached))
        yield client, rank


async def running_stores(stack: AsyncExitStack, agents: Mapping[str, FakeAgents]) -> dict[str, FakeAgents]:
    """Start a store of each name; their agents by endpoint."""
    configs = {name: store_config(store_id=name) for name in agents}
    servers = {name: await stack.enter_async_context(running_store(configs[name], agents[name])) for name in agents}
    return {server.endpoint: agents[name] for name, server in servers.items()}


async def test_the_rank_is_given_a_session_with_each_store() -> None:
    async with AsyncExitStack() as stack:
        stores = await running_stores(stack, {name: FakeAgents() for name in "ab"})
        async with running_client(stores) as (client, rank):
            await eventually(lambda: len(client.attached) == 2)
            assert sorted(client.attached) == ["a", "b"] == sorted(rank.sessions)
            session = rank.sessions["a"]
            assert session.namespace == worker_identity().kv_namespace
            assert (session.worker_address, len(session.session_key)) == (b"address", 32)


async def test_an_offered_chain_is_pushed_confirmed_and_stored() -> None:
    agents = FakeAgents()
    stored = STORE_OFFERS.labels("stored")
    before = value_of(stored)
    async with attached_client(agents) as (client, rank):
        client.offer(chain(0))
        await eventually(lambda: value_of(stored) == before + 1)
        assert rank.pushed == chain(0)
        client.offer(chain(0, 8))
        await eventually(lambda: value_of(stored) == before + 2)
        assert rank.pushed == chain(0, 8)
        assert [len(ticket.segments) for ticket in agents.opened[0].tickets.values()] == [6, 2]


async def test_a_chain_that_was_offered_before_is_not_offered_again() -> None:
    async with attached_client() as (client, rank):
        for _ in range(10):
            client.offer(chain(0))
        client.offer(chain(7))
        await eventually(lambda: len(rank.pushed) == 12)
        await asyncio.sleep(0.1)
        assert len(rank.pushed) == 12


async def test_a_chain_with_a_forgotten_beginning_is_offered_whole() -> None:
    async with attached_client() as (client, rank):
        client.offer(chain(0, 4))
        await eventually(lambda: len(rank.pushed) == 4)
        # Takes the whole store.
        client.offer(chain(7, 16))
        await eventually(lambda: len(rank.pushed) == 20)
        client.offer(chain(0, 5))
        await eventually(lambda: len(rank.pushed) == 25)
        assert rank.pushed[20:] == chain(0, 5)


@pytest.mark.parametrize("fault", get_args(Fault))
async def test_an_offer_with_a_fault_is_made_again(fault: Fault) -> None:
    async with attached_client() as (client, rank):
        failed = STORE_OFFERS.labels("failed")
        rank.fault, before = fault, value_of(failed)
        client.offer(chain(0))
        await eventually(lambda: value_of(failed) == before + 1)
        assert len(rank.pushed) == 6
        rank.fault = None
        await eventually(lambda: offered_again(client, 0) and len(rank.pushed) == 12)


async def test_the_log_tells_once_of_offers_that_keep_failing(caplog: pytest.LogCaptureFixture) -> None:
    failed = STORE_OFFERS.labels("failed")
    before = value_of(failed)
    async with attached_client() as (client, rank):
        rank.fault = "the bytes are wrong"
        numbers = count()
        await eventually(lambda: offered_again(client, next(numbers)) and value_of(failed) > before + TOLD_FAILURES)
    (told,) = [record for record in caplog.records if record.name == "kvstore.offer_link"]
    assert told.levelno == logging.WARNING and "as 2 did before" in told.getMessage()


async def test_what_belongs_to_no_offer_is_left_to_others() -> None:
    client = StoreClient([], worker_identity(), FakeRank([]), Channels())
    assert not client.push_ended(PushEnded(bytes(16), 0, "none"))
    client.offer(chain(0))


async def test_chains_are_divided_between_stores_by_their_root() -> None:
    agents = {name: FakeAgents() for name in "ab"}
    async with AsyncExitStack() as stack:
        stores = await running_stores(stack, agents)
        client, _ = await stack.enter_async_context(running_client(stores))
        await eventually(lambda: len(client.attached) == 2)
        chains = [chain(number, 1) for number in range(0, 2000, 100)]
        for each in chains:
            client.offer(each)
        expected = {name: sum(rendezvous("ab", each[0]) == name for each in chains) for name in "ab"}
        await eventually(
            lambda: (
                {name: sum(len(t.segments) for t in agents[name].opened[0].tickets.values()) for name in "ab"}
                == expected
            )
        )


async def test_a_restarted_store_is_attached_anew_and_offered_everything_again() -> None:
    config = store_config(server={"port": free_port(), "drain_seconds": 0.2}, session_seconds=2)
    agents = FakeAgents()
    async with AsyncExitStack() as stack:
        async with running_store(config, agents) as server:
            client, rank = await stack.enter_async_context(running_client({server.endpoint: agents}))
            await eventually(lambda: bool(client.attached))
            client.offer(chain(0))
            await eventually(lambda: len(rank.pushed) == 6)
        await eventually(lambda: not rank.sessions)
        assert client.attached == []
        async with running_store(config, agents):
            await eventually(lambda: bool(rank.sessions))
            # A process that stood still for long may have been attached again in between.
            first, *_, second = rank.attached
            assert first.epoch != second.epoch and first.session_key != second.session_key
            client.offer(chain(0))
            await eventually(lambda: len(rank.pushed) == 12)

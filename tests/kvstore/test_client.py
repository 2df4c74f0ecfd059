"""A worker's client against stores over gRPC; what the rank would do is done by a fake that pushes no bytes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from kvstore.__main__ import running_store
from kvstore.client import StoreClient
from mesh.blocks import chain_hashes
from mesh.ports import free_port
from mesh.rendezvous import rendezvous
from tests.support.store_agent import RIGHT_DIGEST, FakeAgents, worker_identity
from tests.support.stores import store_config
from tests.support.waiting import eventually
from transfer.events import PushEnded
from transfer.ticket import SegmentDigest, StoreSession, Ticket


def chain(number: int, blocks: int = 6) -> list[bytes]:
    return chain_hashes(range(number, number + 64 * blocks))


class FakeRank:
    """Pushes what it is granted, at once, with `digest`; None pushes nothing and says so."""

    def __init__(self) -> None:
        self.sessions: dict[str, StoreSession] = {}
        self.attached: list[StoreSession] = []
        self.pushed: list[bytes] = []
        self.granted: list[int] = []
        self.digest: bytes | None = RIGHT_DIGEST
        self.client: StoreClient | None = None

    def attach_store(self, session: StoreSession) -> None:
        self.sessions[session.store_id] = session
        self.attached.append(session)

    def detach_store(self, store_id: str) -> None:
        del self.sessions[store_id]

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        self.pushed += hashes
        if self.digest is None:
            asyncio.get_running_loop().call_soon(self._end, ticket.transfer_id)

    def grant_offer(self, transfer_id: bytes, segment: int) -> None:
        self.granted.append(segment)
        if self.digest is not None:
            asyncio.get_running_loop().call_soon(self._sent, transfer_id, segment, self.digest)

    def _sent(self, transfer_id: bytes, segment: int, digest: bytes) -> None:
        assert self.client is not None
        assert self.client.segment_sent(SegmentDigest(transfer_id, segment, 64, digest))

    def _end(self, transfer_id: bytes) -> None:
        assert self.client is not None
        assert self.client.push_ended(PushEnded(transfer_id, 0, "none", "the blocks are gone"))


@asynccontextmanager
async def running_client(*endpoints: str) -> AsyncIterator[tuple[StoreClient, FakeRank]]:
    rank = FakeRank()
    client = rank.client = StoreClient(endpoints, worker_identity(), rank)
    task = asyncio.create_task(client.run())
    yield client, rank
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_the_rank_is_given_a_session_with_each_store() -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(running_store(store_config(store_id=name), FakeAgents())) for name in "ab"
        ]
        async with running_client(*(server.endpoint for server in servers)) as (client, rank):
            await eventually(lambda: len(client.attached) == 2)
            assert sorted(client.attached) == ["a", "b"] == sorted(rank.sessions)
            session = rank.sessions["a"]
            assert session.namespace == worker_identity().kv_namespace
            assert (session.worker_address, len(session.session_key)) == (b"address", 32)


async def test_an_offered_chain_is_pushed_confirmed_and_stored() -> None:
    agents = FakeAgents(window=2)
    async with running_store(store_config(), agents) as server, running_client(server.endpoint) as (client, rank):
        await eventually(lambda: bool(client.attached))
        client.offer(chain(0))
        await eventually(lambda: len(rank.granted) == 6)
        assert rank.pushed == chain(0) and sorted(rank.granted) == list(range(6))
        client.offer(chain(0, 8))
        await eventually(lambda: len(rank.pushed) == 8)
        assert rank.pushed == chain(0, 8)
        assert [len(ticket.segments) for ticket in agents.opened[0].tickets] == [6, 2]


async def test_a_chain_that_was_offered_before_is_not_offered_again() -> None:
    async with running_store(store_config(), FakeAgents()) as server, running_client(server.endpoint) as (client, rank):
        await eventually(lambda: bool(client.attached))
        for _ in range(10):
            client.offer(chain(0))
        client.offer(chain(7))
        await eventually(lambda: len(rank.pushed) == 12)
        await asyncio.sleep(0.1)
        assert len(rank.pushed) == 12


async def test_a_chain_is_offered_from_its_root_where_the_store_forgot_its_beginning() -> None:
    async with running_store(store_config(), FakeAgents()) as server, running_client(server.endpoint) as (client, rank):
        await eventually(lambda: bool(client.attached))
        client.offer(chain(0, 4))
        await eventually(lambda: len(rank.pushed) == 4)
        # Takes the whole store.
        client.offer(chain(7, 16))
        await eventually(lambda: len(rank.pushed) == 20)
        client.offer(chain(0, 5))
        await eventually(lambda: len(rank.pushed) == 25)
        assert rank.pushed[20:] == chain(0, 5)


@pytest.mark.parametrize("digest", [None, b"wrong"])
async def test_what_could_not_be_pushed_or_was_wrong_is_offered_again(digest: bytes | None) -> None:
    config = store_config(offer_seconds=0.5)
    agents = FakeAgents()
    async with running_store(config, agents) as server, running_client(server.endpoint) as (client, rank):
        await eventually(lambda: bool(client.attached))
        rank.digest = digest
        client.offer(chain(0))
        await eventually(lambda: len(rank.pushed) == 6)
        await asyncio.sleep(0.1)
        rank.digest = RIGHT_DIGEST
        client.offer(chain(0))
        await eventually(lambda: len(rank.pushed) == 12)


async def test_what_belongs_to_no_offer_is_left_to_others() -> None:
    client = StoreClient([], worker_identity(), FakeRank())
    assert not client.segment_sent(SegmentDigest(bytes(16), 0, 1, b""))
    assert not client.push_ended(PushEnded(bytes(16), 0, "none"))
    client.offer(chain(0))


async def test_chains_are_divided_between_stores_by_their_root() -> None:
    agents = {name: FakeAgents() for name in "ab"}
    async with AsyncExitStack() as stack:
        endpoints = [
            (await stack.enter_async_context(running_store(store_config(store_id=name), agents[name]))).endpoint
            for name in "ab"
        ]
        client, _ = await stack.enter_async_context(running_client(*endpoints))
        await eventually(lambda: len(client.attached) == 2)
        chains = [chain(number, 1) for number in range(0, 2000, 100)]
        for each in chains:
            client.offer(each)
        expected = {name: sum(rendezvous("ab", each[0]) == name for each in chains) for name in "ab"}
        await eventually(
            lambda: {name: sum(len(t.segments) for t in agents[name].opened[0].tickets) for name in "ab"} == expected
        )


async def test_a_restarted_store_is_attached_anew_and_offered_everything_again() -> None:
    config = store_config(server={"port": free_port(), "drain_seconds": 0.2}, session_seconds=0.6)
    async with AsyncExitStack() as stack:
        async with running_store(config, FakeAgents()) as server:
            client, rank = await stack.enter_async_context(running_client(server.endpoint))
            await eventually(lambda: bool(client.attached))
            client.offer(chain(0))
            await eventually(lambda: len(rank.pushed) == 6)
        await eventually(lambda: not rank.sessions)
        assert client.attached == []
        async with running_store(config, FakeAgents()):
            await eventually(lambda: bool(rank.sessions))
            first, second = rank.attached
            assert first.epoch != second.epoch and first.session_key != second.session_key
            client.offer(chain(0))
            await eventually(lambda: len(rank.pushed) == 12)

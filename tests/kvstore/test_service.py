"""The store over gRPC, with agents that move no bytes."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from deepmesh.internal.v1 import kvstore_pb2, landing_pb2

from kvstore.__main__ import SERVICE, running_store
from kvstore.config import KvStoreConfig
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from mesh.domain.shares import tenant_tag
from mesh.domain.workers import WorkerIdentity
from mesh.errors import (
    InvalidRequest,
    MeshError,
    NamespaceMismatch,
    OfferFailed,
    UnknownSession,
    UnknownTransfer,
)
from mesh.metrics import KVSTORE_QUOTA_EVICTED_BLOCKS, KVSTORE_REFUSALS, KVSTORE_TENANT_BLOCKS, RPC_STARTED
from tests.support.store_agent import FakeAgent, FakeAgents, worker_identity
from tests.support.stores import store_config, store_stub
from tests.support.valkey import running_valkey
from tests.support.waiting import eventually

CHAIN = chain_hashes(range(64 * 20))
DRAIN_SECONDS = 60


@dataclass
class Client:
    """One worker's calls, as they stand in the protos."""

    stub: Any
    worker: WorkerIdentity
    agents: FakeAgents
    session: Any = None

    async def beside(self, worker: WorkerIdentity) -> "Client":
        """Another worker, attached to the same store."""
        other = Client(self.stub, worker, self.agents)
        await other.attach()
        return other

    @property
    def agent(self) -> FakeAgent:
        """The store's."""
        (agent,) = self.agents.opened
        return agent

    async def attach(self) -> kvstore_pb2.AttachWorkerResponse:
        """A session, or its renewal."""
        session_id = self.session.session_id if self.session else 0
        request = kvstore_pb2.AttachWorkerRequest(
            worker=worker_wire.identity_message(self.worker), session_id=session_id
        )
        session: kvstore_pb2.AttachWorkerResponse = await self.stub.AttachWorker(request)
        self.session = session
        return session

    async def offer(
        self, hashes: Sequence[bytes], parent: bytes = b"", tenant: bytes = b""
    ) -> kvstore_pb2.OfferResponse:
        session_id = self.session.session_id if self.session else 1
        request = kvstore_pb2.OfferRequest(
            session_id=session_id, parent_hash=parent, block_hashes=hashes, tenant=tenant
        )
        response: kvstore_pb2.OfferResponse = await self.stub.Offer(request)
        return response

    async def confirm(self, ticket: landing_pb2.LandingTicket, **options: Any) -> int:
        """How many blocks were stored."""
        request = kvstore_pb2.ConfirmOfferRequest(session_id=self.session.session_id, transfer_id=ticket.transfer_id)
        response: kvstore_pb2.ConfirmOfferResponse = await self.stub.ConfirmOffer(request, **options)
        return response.stored_blocks

    async def withdraw(self, ticket: landing_pb2.LandingTicket) -> None:
        await self.stub.WithdrawOffer(
            kvstore_pb2.WithdrawOfferRequest(session_id=self.session.session_id, transfer_id=ticket.transfer_id)
        )

    async def store(self, hashes: Sequence[bytes], parent: bytes = b"", tenant: bytes = b"") -> int:
        """Offer, and push all that is wanted; returns how many blocks the store took."""
        response = await self.offer(hashes, parent, tenant)
        if not response.HasField("ticket"):
            return 0
        self.agent.land(response.ticket.transfer_id)
        return await self.confirm(response.ticket)

    async def match(self, hashes: Sequence[bytes]) -> kvstore_pb2.MatchPrefixResponse:
        namespace = worker_wire.namespace_message(self.worker.kv_namespace)
        request = kvstore_pb2.MatchPrefixRequest(kv_namespace=namespace, block_hashes=hashes)
        response: kvstore_pb2.MatchPrefixResponse = await self.stub.MatchPrefix(request)
        return response

    async def until_matched(self, hashes: Sequence[bytes], blocks: int) -> kvstore_pb2.MatchPrefixResponse:
        """The index hears of changes a moment later."""
        responses: list[kvstore_pb2.MatchPrefixResponse] = []

        async def matched() -> bool:
            responses.append(await self.match(hashes))
            return bool(responses[-1].blocks == blocks)

        await eventually(matched)
        return responses[-1]

    async def status(self) -> kvstore_pb2.GetStatusResponse:
        response: kvstore_pb2.GetStatusResponse = await self.stub.GetStatus(kvstore_pb2.GetStatusRequest())
        return response


@asynccontextmanager
async def unused_store(config: KvStoreConfig | None = None) -> AsyncIterator[Client]:
    """A store, and a worker that is not attached to it yet."""
    agents = FakeAgents()
    async with (
        running_store(config or store_config(), agents) as server,
        store_stub(server.endpoint) as stub,
    ):
        yield Client(stub, worker_identity(), agents)


@asynccontextmanager
async def store_client(config: KvStoreConfig | None = None) -> AsyncIterator[Client]:
    """A store, and a worker that is attached to it."""
    async with unused_store(config) as client:
        await client.attach()
        yield client


def refusals(error: type[MeshError]) -> float:
    return float(KVSTORE_REFUSALS.labels(error.reason)._value.get())


async def test_what_each_tenant_has_is_told_by_its_name_or_its_tag() -> None:
    quotas = {"quota": {"memory_bytes": 4 << 12}, "tenants": [{"name": "acme"}]}
    acme, other = tenant_tag("acme"), tenant_tag("other")

    def told(metric: Any, tenant: str) -> float:
        return float(metric.labels(tenant, "memory")._value.get())

    evicted = told(KVSTORE_QUOTA_EVICTED_BLOCKS, other.hex())
    async with store_client(store_config(**quotas)) as client:
        assert await client.store(CHAIN[:6], tenant=acme) == 6
        for seed in range(2):
            assert await client.store(chain_hashes(range(64 * 3), bytes([seed])), tenant=other) == 3
        await eventually(lambda: told(KVSTORE_TENANT_BLOCKS, "acme") == 6)
        await eventually(lambda: told(KVSTORE_TENANT_BLOCKS, other.hex()) == 4)
        await eventually(lambda: told(KVSTORE_QUOTA_EVICTED_BLOCKS, other.hex()) == evicted + 2)


async def test_a_renewed_session_stays_the_same() -> None:
    async with store_client() as client:
        first = client.session
        assert await client.attach() == first
        assert first.store_id == "s" and len(first.session_key) == 32
        assert first.lease.ToMilliseconds() == 10_000
        assert client.agent.sessions == {first.session_id: first.session_key}


async def test_a_session_that_is_not_renewed_is_closed_for_its_agent() -> None:
    async with store_client(store_config(session_seconds=0.2)) as client:
        await eventually(lambda: client.agent.sessions == {})
        with pytest.raises(UnknownSession):
            await client.offer(CHAIN)


async def test_blocks_of_another_size_are_refused_and_other_namespaces_of_the_same_are_not() -> None:
    async with store_client() as client:
        for other in (worker_identity("x", block_bytes=8192), worker_identity("x", layers=4)):
            with pytest.raises(NamespaceMismatch, match="a store of its own"):
                await client.beside(other)
        beside = await client.beside(worker_identity("b", weights="other"))
        assert await client.store(CHAIN[:3]) == 3
        await client.until_matched(CHAIN, 3)
        assert (await beside.match(CHAIN)).blocks == 0
        assert await beside.store(CHAIN[:2]) == 2
        await beside.until_matched(CHAIN, 2)
        assert (await client.match(CHAIN)).blocks == 3
        assert len(client.agents.opened) == 1


async def test_a_ticket_is_for_the_namespace_of_the_worker_that_offers() -> None:
    async with store_client() as client:
        beside = await client.beside(worker_identity("b", weights="other"))
        response = await beside.offer(CHAIN[:2])
        assert response.ticket.kv_namespace == worker_wire.namespace_message(beside.worker.kv_namespace)


async def test_a_worker_whose_slots_hold_no_block_of_one_layer_is_refused() -> None:
    async with store_client() as client:
        await client.beside(worker_identity("a", slot_bytes=2048))
        with pytest.raises(InvalidRequest, match="slots of 2047 bytes"):
            await client.beside(worker_identity("b", slot_bytes=2047))


@pytest.mark.parametrize("block_bytes", [0, 4097, 1 << 20])
async def test_a_first_worker_whose_blocks_cannot_be_kept_is_refused(block_bytes: int) -> None:
    async with unused_store() as client:
        with pytest.raises((InvalidRequest, NamespaceMismatch)):
            await client.beside(worker_identity(block_bytes=block_bytes))
        await client.attach()


async def test_blocks_are_matched_once_they_have_landed_confirmed_or_not() -> None:
    async with store_client() as client:
        response = await client.offer(CHAIN[:3])
        assert list(response.wanted) == [0, 1, 2]
        assert (await client.match(CHAIN)).blocks == 0
        client.agent.land(response.ticket.transfer_id)
        matched = await client.until_matched(CHAIN, 3)
        assert (matched.store_id, matched.epoch) == ("s", client.session.epoch)


async def test_a_confirmation_is_answered_when_all_has_landed() -> None:
    async with store_client() as client:
        ticket = (await client.offer(CHAIN[:2])).ticket
        confirmation = asyncio.create_task(client.confirm(ticket))
        await asyncio.sleep(0.1)
        assert not confirmation.done()
        client.agent.land(ticket.transfer_id)
        assert await confirmation == 2


async def test_a_confirmation_that_comes_again_is_answered_again() -> None:
    async with store_client() as client:
        ticket = (await client.offer(CHAIN[:2])).ticket
        client.agent.land(ticket.transfer_id)
        for _ in range(2):
            assert await client.confirm(ticket) == 2


async def test_a_worker_that_waits_no_longer_for_its_confirmation_may_ask_again() -> None:
    async with store_client() as client:
        ticket = (await client.offer(CHAIN[:2])).ticket
        with pytest.raises(MeshError):
            await client.confirm(ticket, timeout=0.2)
        client.agent.land(ticket.transfer_id)
        assert await client.confirm(ticket) == 2
        assert client.agent.cancelled == []


async def test_two_offers_of_one_block_get_one_landing() -> None:
    async with store_client() as client:
        answers = await asyncio.gather(*(client.offer(CHAIN[:4]) for _ in range(5)))
        assert sorted(len(answer.wanted) for answer in answers) == [0, 0, 0, 0, 4]
        assert len(client.agent.tickets) == 1


async def test_blocks_are_wanted_only_after_the_one_they_depend_on() -> None:
    async with store_client() as client:
        answer = await client.offer(CHAIN[2:4], parent=CHAIN[1])
        assert answer.parent_missing and not answer.wanted
        await client.store(CHAIN[:2])
        answer = await client.offer(CHAIN[1:4], parent=CHAIN[0])
        assert not answer.parent_missing and list(answer.wanted) == [1, 2]


async def test_a_full_store_takes_what_fits_and_forgets_what_is_oldest() -> None:
    async with store_client() as client:
        other = chain_hashes(range(1, 1 + 64 * 4))
        assert await client.store(other) == 4
        assert await client.store(CHAIN) == 16
        await client.until_matched(CHAIN, 16)
        assert (await client.match(other)).blocks == 0
        tier = (await client.status()).tiers[0]
        assert (tier.name, tier.used_blocks, tier.total_blocks, tier.block_bytes) == ("memory", 16, 16, 4096)


async def test_a_landing_that_failed_stores_nothing_and_the_blocks_can_be_offered_again() -> None:
    async with store_client() as client:
        ticket = (await client.offer(CHAIN[:2])).ticket
        before = refusals(OfferFailed)
        client.agent.disbelieve(ticket.transfer_id)
        for _ in range(2):
            with pytest.raises(OfferFailed, match="NOT_BELIEVED"):
                await client.confirm(ticket)
        assert refusals(OfferFailed) == before + 2
        assert (await client.status()).tiers[0].used_blocks == 0
        assert await client.store(CHAIN[:2]) == 2


async def test_a_withdrawn_offer_frees_its_blocks_at_once_and_only_for_who_made_it() -> None:
    async with store_client() as client:
        other = await client.beside(worker_identity("b"))
        ticket = (await client.offer(CHAIN[:2])).ticket
        await other.withdraw(ticket)
        assert not (await other.offer(CHAIN[:2])).wanted
        await client.withdraw(ticket)
        await client.withdraw(ticket)
        assert client.agent.cancelled == [ticket.transfer_id]
        assert await other.store(CHAIN[:2]) == 2


async def test_a_store_that_stops_ends_the_confirmations_that_wait() -> None:
    config, agents = store_config(server={"drain_seconds": DRAIN_SECONDS}), FakeAgents()
    async with AsyncExitStack() as clients:
        async with running_store(config, agents) as server:
            stub = await clients.enter_async_context(store_stub(server.endpoint))
            client = await Client(stub, worker_identity(), agents).beside(worker_identity())
            ticket, calls = (
                (await client.offer(CHAIN[:2])).ticket,
                RPC_STARTED.labels(f"/{SERVICE}/ConfirmOffer")._value,
            )
            before = calls.get()
            confirmation = asyncio.create_task(client.confirm(ticket))
            await eventually(lambda: calls.get() == before + 1)
            began = time.monotonic()
        # Else it waits for as long as calls may take to end.
        assert time.monotonic() - began < DRAIN_SECONDS
        with pytest.raises(OfferFailed, match="stopping"):
            await confirmation


async def test_a_transfer_is_confirmed_only_by_the_session_that_offered() -> None:
    async with store_client() as client:
        other = await client.beside(worker_identity("b"))
        ticket = (await client.offer(CHAIN[:2])).ticket
        with pytest.raises(UnknownTransfer):
            await other.confirm(ticket)


@pytest.mark.parametrize("transfer_id", [bytes(16), b"short", b""])
async def test_a_transfer_that_never_was_is_refused_and_counted(transfer_id: bytes) -> None:
    async with store_client() as client:
        before = refusals(UnknownTransfer)
        with pytest.raises(UnknownTransfer):
            await client.confirm(landing_pb2.LandingTicket(transfer_id=transfer_id))
        assert refusals(UnknownTransfer) == before + 1


async def test_bad_input_is_refused_and_counted() -> None:
    async with store_client() as client:
        before = refusals(InvalidRequest)
        bad_calls = [
            client.offer([b"short"]),
            client.offer([bytes(16)] * 20_000),
            client.offer(CHAIN, parent=b"short"),
            client.offer(CHAIN, tenant=b"a name"),
            client.match([bytes(17)]),
        ]
        for call in bad_calls:
            with pytest.raises(InvalidRequest):
                await call
        assert refusals(InvalidRequest) == before + len(bad_calls)


async def test_an_unknown_session_is_refused_and_counted() -> None:
    async with store_client() as client:
        client.session.session_id += 1
        before = refusals(UnknownSession)
        with pytest.raises(UnknownSession):
            await client.offer(CHAIN)
        assert refusals(UnknownSession) == before + 1


async def test_a_store_that_nobody_attached_to_answers_nothing() -> None:
    async with unused_store() as client:
        assert (await client.match(CHAIN)).blocks == 0
        status = await client.status()
        assert status.tiers[0].total_blocks == 0 and status.store_id == "s"
        with pytest.raises(UnknownSession):
            await client.offer(CHAIN)


async def test_stores_that_share_a_redis_know_of_each_others_blocks() -> None:
    with running_valkey() as valkey:
        configs = [store_config(store_id=name, index={"redis_url": valkey.connection_url}) for name in "ab"]
        async with store_client(configs[0]) as a, store_client(configs[1]) as b:
            await a.store(CHAIN[:2])
            await b.store(CHAIN[:5])
            for client in (a, b):
                await eventually_matches(client, ("b", 5))
                assert (await client.match(CHAIN)).epoch == b.session.epoch


async def eventually_matches(client: Client, expected: tuple[str, int]) -> None:
    async def matches() -> bool:
        matched = await client.match(CHAIN)
        return (matched.store_id, matched.blocks) == expected

    await eventually(matches)

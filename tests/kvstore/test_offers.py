"""Offers over gRPC, from the landing to the confirmation, with agents that move no bytes."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from deepmesh.internal.v1 import landing_pb2

from kvstore.__main__ import SERVICE, running_store
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from mesh.errors import MeshError, OfferFailed, UnknownTransfer
from mesh.observe.metrics import RPC_STARTED
from tests.support.metric_values import value_of
from tests.support.store_agent import FakeAgents, worker_identity
from tests.support.store_client import CHAIN, Client, refusals, store_client
from tests.support.stores import store_config, store_stub
from tests.support.waiting import eventually

DRAIN_SECONDS = 60


async def test_a_ticket_has_the_offering_workers_namespace() -> None:
    async with store_client() as client:
        joined = await client.joined_by(worker_identity("b", weights="other"))
        response = await joined.offer(CHAIN[:2])
        assert response.ticket.kv_namespace == worker_wire.namespace_message(joined.worker.kv_namespace)


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


async def test_a_worker_may_ask_again_for_its_confirmation() -> None:
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


async def test_a_full_store_evicts_the_oldest_for_what_fits() -> None:
    async with store_client() as client:
        other = chain_hashes(range(1, 1 + 64 * 4))
        assert await client.store(other) == 4
        assert await client.store(CHAIN) == 16
        await client.until_matched(CHAIN, 16)
        assert (await client.match(other)).blocks == 0
        tier = (await client.status()).tiers[0]
        assert (tier.name, tier.used_blocks, tier.total_blocks, tier.block_bytes) == ("memory", 16, 16, 4096)


async def test_blocks_of_a_failed_landing_can_be_offered_again() -> None:
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


async def test_only_its_worker_withdraws_an_offer_which_frees_its_blocks() -> None:
    async with store_client() as client:
        other = await client.joined_by(worker_identity("b"))
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
            client = await Client(stub, worker_identity(), agents).joined_by(worker_identity())
            ticket = (await client.offer(CHAIN[:2])).ticket
            calls = RPC_STARTED.labels(f"/{SERVICE}/ConfirmOffer")
            before = value_of(calls)
            confirmation = asyncio.create_task(client.confirm(ticket))
            await eventually(lambda: value_of(calls) == before + 1)
            began = time.monotonic()
        # Else it waits for as long as calls may take to end.
        assert time.monotonic() - began < DRAIN_SECONDS
        with pytest.raises(OfferFailed, match="stopping"):
            await confirmation


async def test_a_transfer_is_confirmed_only_by_the_session_that_offered() -> None:
    async with store_client() as client:
        other = await client.joined_by(worker_identity("b"))
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

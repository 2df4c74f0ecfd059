"""A running store over gRPC, and the calls of its workers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from deepmesh.internal.v1 import kvstore_pb2, landing_pb2

from kvstore.__main__ import running_store
from kvstore.config import KvStoreConfig
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from mesh.domain.workers import WorkerIdentity
from mesh.errors import MeshError
from mesh.observe.metrics import KVSTORE_REFUSALS
from tests.support.metric_values import value_of
from tests.support.store_agent import FakeAgent, FakeAgents, worker_identity
from tests.support.stores import store_config, store_stub
from tests.support.waiting import eventually

CHAIN = chain_hashes(range(64 * 20))


@dataclass
class Client:
    """The calls of one worker to a store, as in the protos."""

    stub: Any
    worker: WorkerIdentity
    agents: FakeAgents
    session: Any = None

    async def joined_by(self, worker: WorkerIdentity) -> "Client":
        """Another worker, attached to the same store."""
        other = Client(self.stub, worker, self.agents)
        await other.attach()
        return other

    @property
    def agent(self) -> FakeAgent:
        """The store's transfer agent."""
        (agent,) = self.agents.opened
        return agent

    async def attach(self) -> kvstore_pb2.AttachWorkerResponse:
        """Open a session, or renew it."""
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
        """Confirm an offer; returns how many blocks were stored."""
        request = kvstore_pb2.ConfirmOfferRequest(session_id=self.session.session_id, transfer_id=ticket.transfer_id)
        response: kvstore_pb2.ConfirmOfferResponse = await self.stub.ConfirmOffer(request, **options)
        return response.stored_blocks

    async def withdraw(self, ticket: landing_pb2.LandingTicket) -> None:
        await self.stub.WithdrawOffer(
            kvstore_pb2.WithdrawOfferRequest(session_id=self.session.session_id, transfer_id=ticket.transfer_id)
        )

    async def store(self, hashes: Sequence[bytes], parent: bytes = b"", tenant: bytes = b"") -> int:
        """Offer blocks and push those that the store wants; returns how many it took."""
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
        """Wait until a match has this many blocks, since the index learns of changes a moment later."""
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
    return value_of(KVSTORE_REFUSALS.labels(error.reason))

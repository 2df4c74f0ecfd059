"""One rank's session with one store: attached, renewed, and opened again if the store was restarted."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc

from kvstore.offer_link import CONCURRENT_OFFERS, OfferLink
from kvstore.store_user import StoreUser
from mesh.backoff import Backoff
from mesh.domain import worker_wire
from mesh.domain.workers import WorkerIdentity
from mesh.errors import MeshError
from mesh.rpc.channel import Channels
from mesh.rpc.identity import Role
from transfer import wire
from transfer.ticket import StoreSession

log = logging.getLogger(__name__)

# A store that has not answered for this long is frozen or gone.
ANSWER_SECONDS = 3.0
RENEWALS_A_LEASE = 3


class StoreLink:
    """`store_id` is None while there is no session."""

    def __init__(self, endpoint: str, worker: WorkerIdentity, rank: int, user: StoreUser, channels: Channels) -> None:
        self._endpoint = endpoint
        self._worker = worker
        self._rank = rank
        self._user = user
        self._channels = channels
        self._session: StoreSession | None = None
        self._backoff = Backoff(log)
        # Set if the session may no longer exist.
        self._doubt = asyncio.Event()
        self.offers = OfferLink(user, self._doubt)

    @property
    def store_id(self) -> str | None:
        return self._session.store_id if self._session else None

    async def run(self) -> None:
        """Run until cancelled."""
        async with self._channels.open(self._endpoint, Role.KVSTORE) as channel, asyncio.TaskGroup() as group:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            for _ in range(CONCURRENT_OFFERS):
                group.create_task(self.offers.run(stub))
            group.create_task(self._keep_session(stub))

    async def _keep_session(self, stub: Any) -> None:
        while True:
            self._doubt.clear()
            try:
                response = await stub.AttachWorker(self._request(), timeout=ANSWER_SECONDS)
            except MeshError as error:
                self._lose()
                await self._backoff.failed(f"no session with the KV store at {self._endpoint}", error)
                continue
            self._backoff.succeeded()
            self._use(response)
            with suppress(TimeoutError):
                async with asyncio.timeout(response.lease.ToMilliseconds() / 1000 / RENEWALS_A_LEASE):
                    await self._doubt.wait()

    def _request(self) -> kvstore_pb2.AttachWorkerRequest:
        """A request that renews the session, or opens a new one after a loss: the rank then numbers its messages
        again.
        """
        return kvstore_pb2.AttachWorkerRequest(
            worker=worker_wire.identity_message(self._worker),
            rank=self._rank,
            session_id=self._session.session_id if self._session else 0,
        )

    def _use(self, response: kvstore_pb2.AttachWorkerResponse) -> None:
        session = StoreSession(
            store_id=response.store_id,
            epoch=response.epoch,
            worker_address=response.worker_address,
            session_id=response.session_id,
            session_key=response.session_key,
            namespace=self._worker.kv_namespace,
            slab=wire.slab(response.slab) if response.HasField("slab") else None,
        )
        if session == self._session:
            return
        if self._session is not None and self._session.store_id != session.store_id:
            self._user.detach_store(self._session.store_id)
        self._session = session
        self.offers.begin(session)
        self._user.attach_store(session)
        log.info("attached to a KV store", extra={"fields": {"id": session.store_id, "endpoint": self._endpoint}})

    def _lose(self) -> None:
        if self._session is not None:
            self._user.detach_store(self._session.store_id)
            self._session = None
            self.offers.end()

"""KvStoreService: turns messages into calls of the center, and its answers back into messages."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc

from kvstore import wire
from kvstore.center import Center
from mesh.domain import worker_wire
from mesh.errors import EndpointUnavailable, MeshError
from mesh.observe.metrics import KVSTORE_REFUSALS
from mesh.rpc.identity import check_claim, check_worker

Context = grpc.aio.ServicerContext[object, object]


@contextmanager
def counted_refusals() -> Iterator[None]:
    try:
        yield
    except MeshError as error:
        KVSTORE_REFUSALS.labels(error.reason).inc()
        raise


@dataclass(frozen=True, slots=True)
class OpenStore:
    """`epoch` is new at every start."""

    center: Center
    store_id: str
    epoch: str


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Serves nothing until `open`: by default a store's name contains the port, which the server must get first."""

    def __init__(self) -> None:
        self._opened: OpenStore | None = None

    def open(self, store: OpenStore) -> None:
        self._opened = store

    @property
    def _store(self) -> OpenStore:
        if self._opened is None:
            raise EndpointUnavailable("this store is still starting: retry")
        return self._opened

    async def AttachWorker(
        self, request: kvstore_pb2.AttachWorkerRequest, context: Context
    ) -> kvstore_pb2.AttachWorkerResponse:
        with counted_refusals():
            store, worker = self._store, worker_wire.identity(request.worker)
            check_worker(worker.worker_id, worker.role)
            attachment = store.center.attach(worker, request.rank, request.session_id)
            return wire.attach_response(attachment, store.store_id, store.epoch)

    async def MatchPrefix(
        self, request: kvstore_pb2.MatchPrefixRequest, context: Context
    ) -> kvstore_pb2.MatchPrefixResponse:
        with counted_refusals():
            namespace = worker_wire.namespace(request.kv_namespace)
            hashes = wire.chain(request.block_hashes, "block_hashes")
            return wire.match_response(*await self._store.center.match(namespace, hashes))

    async def Offer(self, request: kvstore_pb2.OfferRequest, context: Context) -> kvstore_pb2.OfferResponse:
        with counted_refusals():
            parent_hash = wire.parent(request.parent_hash)
            hashes = wire.chain(request.block_hashes, "block_hashes")
            tenant = wire.tenant(request.tenant)
            center = self._center_of(request.session_id)
            return wire.offer_response(
                center.offer(request.session_id, parent_hash, hashes, tenant, not request.without_drafts)
            )

    async def ConfirmOffer(
        self, request: kvstore_pb2.ConfirmOfferRequest, context: Context
    ) -> kvstore_pb2.ConfirmOfferResponse:
        with counted_refusals():
            center = self._center_of(request.session_id)
            stored_blocks = await center.confirm(request.session_id, request.transfer_id)
            return kvstore_pb2.ConfirmOfferResponse(stored_blocks=stored_blocks)

    async def WithdrawOffer(
        self, request: kvstore_pb2.WithdrawOfferRequest, context: Context
    ) -> kvstore_pb2.WithdrawOfferResponse:
        with counted_refusals():
            self._center_of(request.session_id).withdraw(request.session_id, request.transfer_id)
            return kvstore_pb2.WithdrawOfferResponse()

    async def GetStatus(self, request: kvstore_pb2.GetStatusRequest, context: Context) -> kvstore_pb2.GetStatusResponse:
        store = self._store
        return wire.status_response(store.center.status(), store.store_id, store.epoch)

    def _center_of(self, session_id: int) -> Center:
        """The center, if the session belongs to the caller. Raises UnknownSession, PermissionDenied."""
        center = self._store.center
        check_claim("the session's worker", center.worker_of(session_id))
        return center

"""The KV stores as the scheduler sees them: which of them answer, and how much of a prompt one of them holds."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import TransferCounters
from mesh.rendezvous import rendezvous


class Tier(msgspec.Struct, frozen=True):
    """One kind of storage in a store, e.g. host memory."""

    name: str
    total_blocks: int
    used_blocks: int
    block_bytes: int


class StoreStatus(msgspec.Struct, frozen=True):
    """A store's last status."""

    store_id: str
    tiers: tuple[Tier, ...]
    lookups: int
    hits: int
    attached_workers: int
    transfers: TransferCounters


class Store(Protocol):
    """One configured store."""

    @property
    def endpoint(self) -> str: ...

    @property
    def status(self) -> StoreStatus | None:
        """None while the store does not answer."""
        ...

    async def match(self, namespace: KvNamespace, chain: Sequence[bytes]) -> StoreTarget | None:
        """How many leading blocks of the chain the store holds; None if it holds none, or does not answer in time."""
        ...


class Stores:
    """All configured stores. A chain's store is the one that rendezvous hashing names among those that answer."""

    def __init__(self, stores: Sequence[Store] = ()) -> None:
        self._stores = stores

    def __iter__(self) -> Iterator[Store]:
        return iter(self._stores)

    @property
    def any_answers(self) -> bool:
        return any(store.status is not None for store in self._stores)

    async def match(self, namespace: KvNamespace, chain: Sequence[bytes]) -> StoreTarget | None:
        """What the chain's store holds of it. This is only a hint, and never raises."""
        answering = {store.status.store_id: store for store in self._stores if store.status is not None}
        store_id = rendezvous(answering, chain[0])
        return None if store_id is None else await answering[store_id].match(namespace, chain)

"""The KV that a mesh moves while it serves, read from its scheduler."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2

from cli.status import Snapshot, read_workers
from mesh.errors import NoWorker
from mesh.rpc.channel import Channels

# Workers report changes every 50 ms.
_PAUSE_SECONDS = 0.2
# After this many equal snapshots in a row, no transfer counts as in flight.
_EQUAL_SNAPSHOTS = 2


@dataclass(frozen=True)
class KvTotals:
    """What one worker has received since its start."""

    # By UCX transport.
    received_bytes: Mapping[str, int]
    # Blocks fetched from stores.
    fetched_blocks: int


@dataclass(frozen=True)
class KvMoves:
    """What all workers received between two snapshots."""

    received_bytes: Mapping[str, int]
    fetched_blocks: int


def moves_between(before: Snapshot, after: Snapshot) -> KvMoves:
    """What workers received between two snapshots. Counts of a worker that started in between began at 0."""
    earlier, received, fetched = _totals(before), Counter[str](), 0
    for worker, totals in _totals(after).items():
        known = earlier.get(worker, KvTotals({}, 0))
        received.update(totals.received_bytes)
        received.subtract(known.received_bytes)
        fetched += totals.fetched_blocks - known.fetched_blocks
    return KvMoves(+received, fetched)


async def until_registered(scheduler: str, workers: int, channels: Channels, timeout_seconds: float = 30.0) -> None:
    """Wait until `workers` workers of any role take requests, and each store has as many attached. Raises NoWorker."""

    def registered(snapshot: Snapshot) -> bool:
        serving = sum(worker.state == workers_pb2.WORKER_STATE_SERVING for worker in snapshot.workers)
        return serving >= workers and all(store.attached_workers >= workers for store in snapshot.stores)

    await _until(scheduler, channels, registered, timeout_seconds)


async def settled(scheduler: str, channels: Channels, timeout_seconds: float = 30.0) -> Snapshot:
    """The registry once no KV moves any more: stores have every offered block that they wanted."""
    last: object = None
    equal = 0

    def still(snapshot: Snapshot) -> bool:
        nonlocal last, equal
        now = _totals(snapshot), [tier.used_blocks for store in snapshot.stores for tier in store.tiers]
        equal = equal + 1 if now == last and not _open_transfers(snapshot) else 0
        last = now
        return equal == _EQUAL_SNAPSHOTS

    return await _until(scheduler, channels, still, timeout_seconds)


async def last_path(scheduler: str, channels: Channels) -> str:
    """The workers of the newest placement, in the order in which the request reached them."""
    async with channels.open(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        response = await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest(limit=1), timeout=10)
    for decision in response.decisions:
        for candidate in decision.candidates:
            if not candidate.rejected:
                return " -> ".join(filter(None, (candidate.prefill_worker_id, candidate.worker_id)))
    return "-"


async def _until(
    scheduler: str, channels: Channels, holds: Callable[[Snapshot], bool], timeout_seconds: float
) -> Snapshot:
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                snapshot = await read_workers(scheduler, channels)
                if holds(snapshot):
                    return snapshot
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError as error:
        raise NoWorker(f"the mesh did not come to rest within {timeout_seconds:g} s: see its lines") from error


def _totals(snapshot: Snapshot) -> dict[tuple[str, str], KvTotals]:
    """Totals by worker id and incarnation."""
    return {
        (worker.identity.worker_id, worker.identity.incarnation): KvTotals(
            dict(worker.transfers.received_bytes), worker.transfers.fetched_blocks
        )
        for worker in snapshot.workers
    }


def _open_transfers(snapshot: Snapshot) -> int:
    every = [worker.transfers for worker in snapshot.workers] + [store.transfers for store in snapshot.stores]
    return sum(each.open_landings + each.open_pushes + each.open_fetches for each in every)

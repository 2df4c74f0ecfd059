"""The live workers: leases, states, loads and cached blocks, as the workers' own status streams report them.

A lease ends if it is not renewed in time. The end of a stream alone does not end it, since the worker reattaches. If
another incarnation of a worker id attaches, the earlier process is gone with all that it held. But if the earlier
process's stream is still open and its lease is renewed, both are alive, which is a mistake in the configuration: the
newcomer is refused until the older stream breaks or its lease runs out.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import count, islice

from mesh.costs import CostModel
from mesh.domain.placement import PlacementKey
from mesh.domain.workers import RankStatus, TransferCounters, WorkerIdentity, WorkerLoad, WorkerRole, WorkerState
from mesh.errors import InvalidRequest, LeaseConflict, LeaseExpired, Overloaded
from mesh.observe.metrics import SCHEDULER_WORKERS
from scheduler.cached_blocks import CachedBlocks
from scheduler.config import LeaseConfig
from scheduler.live_worker import Lease, Worker
from scheduler.placement.placed_work import PlacedWork
from scheduler.placement.standings import LOOKS, Standings
from scheduler.prefix_index import Holders
from scheduler.ranks import Rank

log = logging.getLogger(__name__)


# Names of models that are remembered after their last worker has left.
MAX_KNOWN_MODELS = 1024


class Registry:
    """Owns every worker record. `clock` is monotonic, in seconds. `costs` is what measurements are compared with.

    For `lease.gathering_seconds` after workers can report the registry may lack live ones that have not yet.
    """

    def __init__(self, clock: Callable[[], float], lease: LeaseConfig, costs: CostModel) -> None:
        self.lease_seconds = lease.seconds
        # Grows whenever a worker joins, leaves, or changes its state.
        self.version = 0
        self._clock = clock
        self._config = lease
        self.begin_gathering()
        self._costs = costs
        self._workers: dict[str, Worker] = {}
        self._roles: Counter[WorkerRole] = Counter()
        self._by_number: dict[int, Worker] = {}
        # No lease ends before this time.
        self._next_end = float("inf")
        self._blocks = CachedBlocks(lease.max_cached_blocks)
        self._standings = Standings()
        self._known_models: dict[str, None] = {}
        self._streams = 0
        self._change = asyncio.Event()

    def begin_gathering(self) -> None:
        """Called once workers can report, which may be long after this registry was made: imports may follow."""
        self._complete_at = self._clock() + self._config.gathering_seconds

    def attach(self, identity: WorkerIdentity) -> Lease:
        """Begin a status stream. Raises LeaseConflict, or Overloaded if the registry is full."""
        self.expire()
        current = self._workers.get(identity.worker_id)
        if current is None and len(self._workers) >= self._config.max_workers:
            raise Overloaded(f"the scheduler keeps at most {self._config.max_workers} workers", retry_after_ms=10_000)
        if current is not None and current.identity.incarnation != identity.incarnation:
            self._refuse_a_second_process(current)
            self._remove(current)
            current = None
        self._streams += 1
        lease = Lease(identity.worker_id, identity.incarnation, self._streams)
        if current is None:
            self._add(identity, lease)
        else:
            current.lease, current.connected = lease, True
            self._renew(current)
            self._place(current)
        return lease

    def update(
        self,
        lease: Lease,
        state: WorkerState,
        load: WorkerLoad,
        transfers: TransferCounters | None = None,
        ranks: Sequence[RankStatus] = (),
    ) -> None:
        """Renew the lease and store the worker's report. ranks: one report for each rank, if it has several.

        Raises LeaseExpired if the stream's lease has ended, InvalidRequest if the report does not cover each of its
        ranks.
        """
        worker = self._holder(lease)
        if len(ranks) != (worker.identity.ranks if worker.identity.ranks > 1 else 0):
            raise InvalidRequest(
                f"the worker has {worker.identity.ranks} ranks, and reports {len(ranks)}", field="ranks"
            )
        self._renew(worker)
        worker.load, worker.transfers = load, transfers or worker.transfers
        statuses = ranks or [RankStatus(load, worker.transfers, worker.pool_blocks)]
        now = self._clock()
        worker.observe(statuses, now)
        for rank in worker.ranks:
            rank.settle_placements_before(now - self._config.settle_seconds)
        if worker.state is not state:
            worker.state = state
            self._announce()
        self._place(worker)

    def record_blocks(
        self,
        lease: Lease,
        snapshot: bool,
        stored: Sequence[bytes],
        removed: Collection[bytes],
        holders: Sequence[int] = (),
    ) -> None:
        """See `CachedBlocks.record`. Raises LeaseExpired."""
        self._blocks.record(self._holder(lease), snapshot, stored, removed, holders)

    def holders(self, block_hashes: Sequence[bytes]) -> Holders:
        """Which ranks hold which part of a chain now, for `worth_a_look` and for the workers themselves."""
        return self._blocks.holders(block_hashes)

    def leave(self, lease: Lease) -> None:
        """The worker stops in order: forget it now rather than at the end of its lease. Raises LeaseExpired."""
        worker = self._holder(lease)
        log.info("worker left", extra={"fields": {"id": lease.worker_id}})
        self._remove(worker)

    def detach(self, lease: Lease) -> None:
        """A status stream ended. Its lease continues: the worker, or a new incarnation of it, may come back."""
        worker = self._workers.get(lease.worker_id)
        if worker is not None and worker.lease == lease:
            worker.connected = False
            self._place(worker)
            self._announce()

    def expire(self) -> None:
        """Forget the workers whose lease ran out."""
        now = self._clock()
        if now < self._next_end:
            return
        for worker in [worker for worker in self._workers.values() if worker.expires_at <= now]:
            log.warning("worker lost: no status within its lease", extra={"fields": {"id": worker.lease.worker_id}})
            self._remove(worker)
        self._next_end = min((worker.expires_at for worker in self._workers.values()), default=float("inf"))

    def workers(self) -> list[Worker]:
        """Every live worker, by id."""
        self.expire()
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def serving_model(self, model: str) -> list[Worker]:
        """The live workers of a model, whatever their state, by id."""
        return [worker for worker in self.workers() if worker.identity.model == model]

    def worth_a_look(self, model: str, holders: Holders, avoided: int) -> list[Worker]:
        """The live workers of a model that are worth comparing for a prompt, by number; in a small mesh all of them.

        holders: those of the prompt's blocks; avoided: how many workers the request may have to leave out.
        """
        self.expire()
        found: set[int] = set()
        for standing in self._standings.of(model):
            found.update(standing.looks(avoided))
            found.update(standing.holding_most((holders.anywhere or holders).groups(standing.members), LOOKS))
        by_number = self._by_number
        return [by_number[number] for number in sorted(found)]

    def identity(self, worker_id: str) -> WorkerIdentity:
        """The identity of a live worker."""
        return self._workers[worker_id].identity

    def living(self, workers: Collection[Worker]) -> list[Worker]:
        """Those of `workers` that are still alive."""
        self.expire()
        return [worker for worker in workers if self._workers.get(worker.lease.worker_id) is worker]

    @property
    def now(self) -> float:
        """Seconds on the clock by which measurements are timed."""
        return self._clock()

    @property
    def complete_in(self) -> float:
        """Seconds until every live worker must have reported to this registry; 0 after that."""
        return max(0.0, self._complete_at - self._clock())

    def knows_model(self, model: str) -> bool:
        """Whether any worker has ever served it."""
        return model in self._known_models

    def lease_remaining(self, worker: Worker) -> float:
        """Seconds until the worker's lease ends."""
        return max(0.0, worker.expires_at - self._clock())

    def add_placement(self, worker_id: str, rank: int, key: PlacementKey, work: PlacedWork) -> None:
        """Count a placement as load of a rank until the worker's own status certainly includes it."""
        worker = self._workers[worker_id]
        worker.add_placement(rank, key, self._clock(), work)
        worker.placements_changed()
        self._stand(worker)

    def settle_placement(self, worker_id: str, key: PlacementKey) -> None:
        """A placement ended and no longer counts as load of the worker."""
        worker = self._workers.get(worker_id)
        settled = [] if worker is None else [rank.settle_placement(key) for rank in worker.ranks]
        if worker is not None and any(settled):
            worker.placements_changed()
            self._stand(worker)

    async def expire_forever(self, period_seconds: float) -> None:
        """Until cancelled, drop workers whose lease ran out, even if nothing calls the registry."""
        while True:
            await asyncio.sleep(period_seconds)
            self.expire()

    async def changed(self, version: int) -> int:
        """Wait until the registry's version differs from `version`, and return it."""
        while self.version == version:
            await self._change.wait()
        return self.version

    def _refuse_a_second_process(self, current: Worker) -> None:
        if current.connected:
            raise LeaseConflict(
                f"worker_id {current.lease.worker_id!r} belongs to a live worker at {current.identity.endpoint}: "
                "give each worker its own worker_id"
            )

    def _holder(self, lease: Lease) -> Worker:
        worker = self._workers.get(lease.worker_id)
        if worker is not None and worker.expires_at <= self._clock():
            self.expire()
            worker = None
        if worker is None or worker.lease != lease:
            raise LeaseExpired("this stream's lease has ended: open another one, with identity and a snapshot")
        return worker

    def _add(self, identity: WorkerIdentity, lease: Lease) -> None:
        free = (number for number in count() if number not in self._by_number)
        ranks = [
            Rank(number, self._costs, identity.max_step_tokens, identity.speed)
            for number in islice(free, identity.ranks)
        ]
        worker = Worker(identity, lease, self._clock() + self.lease_seconds, ranks)
        self._workers[identity.worker_id] = worker
        self._roles[identity.role] += 1
        self._by_number.update({rank.number: worker for rank in ranks})
        self._next_end = min(self._next_end, worker.expires_at)
        self._place(worker)
        self._known_models.pop(identity.model, None)
        self._known_models[identity.model] = None
        if len(self._known_models) > MAX_KNOWN_MODELS:
            self._known_models.pop(next(iter(self._known_models)))
        log.info("worker joined", extra={"fields": {"id": identity.worker_id, "endpoint": identity.endpoint}})
        self._announce()

    def _remove(self, worker: Worker) -> None:
        del self._workers[worker.lease.worker_id]
        self._roles[worker.identity.role] -= 1
        for rank in worker.ranks:
            del self._by_number[rank.number]
        self._standings.remove(worker.identity, worker.number)
        self._blocks.remove(worker)
        self._announce()

    def _place(self, worker: Worker) -> None:
        """Call this after every change of what placement reads of the worker."""
        worker.changed()
        self._stand(worker)

    def _stand(self, worker: Worker) -> None:
        self._standings.place(worker.identity, worker.number, worker.bits, worker.use)

    def _renew(self, worker: Worker) -> None:
        worker.expires_at = self._clock() + self.lease_seconds

    def _announce(self) -> None:
        self.version += 1
        for role in WorkerRole:
            SCHEDULER_WORKERS.labels(role.value).set(self._roles[role])
        self._change.set()
        self._change = asyncio.Event()

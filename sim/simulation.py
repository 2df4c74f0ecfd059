"""A whole fleet put together on one timeline, and the run of a workload on it."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from engine.protocol.messages import StepResult
from mesh.cost_file import load_costs
from mesh.costs import CostModel
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import WorkerIdentity, WorkerRole
from mesh.rendezvous import rendezvous
from sim.asked import Asked
from sim.device import VOCABULARY
from sim.faults import Faults
from sim.fleet import FleetConfig, GroupConfig
from sim.gateway import Live, SimulatedGateway
from sim.lifecycle import Lifecycle
from sim.lockstep import Lockstep
from sim.network import Link
from sim.rank import SimulatedRank
from sim.rank_maker import MODEL, RankMaker
from sim.remote_prompts import Calls
from sim.reports import StatusReporter
from sim.scheduling import SimulatedScheduler
from sim.store import SimulatedStore
from sim.timeline import Timeline
from sim.worker import SimulatedWorker

# The simulation goes on for so long after the last request, so that pushes end and reports are sent.
SETTLE_SECONDS = 5.0


class SimulatedMesh:
    """Built from a fleet; `run` drives one workload through it.

    Attributes:
        ended: every request that has ended, in the order of the ends.
    """

    def __init__(self, fleet: FleetConfig, seed: int) -> None:
        self.timeline = Timeline()
        self.ended: list[Live] = []
        self._fleet = fleet
        self._costs = {role: _costs(fleet, fleet.group(role)) for role in WorkerRole}
        self._namespace = KvNamespace("simulated", "simulated", fleet.layers, "simulated")
        self._slow = np.random.default_rng([seed, 2])
        self.stores = self._make_stores()
        # For each offered block, the root of its chain.
        self._roots: dict[bytes, bytes] = {}
        self._store_by_id = {store.store_id: store for store in self.stores}
        self._ranks = RankMaker(self.timeline, fleet, self._costs, self._namespace, self._store_by_id)
        decode_costs = self._costs[WorkerRole.DECODE]
        self.scheduler = SimulatedScheduler(self.timeline, fleet.scheduler, decode_costs, self.stores)
        self.lifecycle = Lifecycle(
            self.timeline, self.scheduler, MODEL, self._make_worker, lambda role: self._costs[role].start_seconds
        )
        self._by_id: dict[str, SimulatedWorker] = {}
        self._calls = Calls(decode_costs.handover_ms / 2000, self._by_id.get)
        self._call_seconds = decode_costs.request_ms / 2000
        self.gateway = SimulatedGateway(
            self.timeline,
            self.scheduler,
            self._by_id.get,
            fleet.dispatch,
            MODEL,
            self._call_seconds,
            fleet.fair,
            fleet.sparse_prefill.offered,
            fleet.every_token or max(fleet.prefill.ranks, fleet.decode.ranks) > 1,
            self.ended.append,
        )
        self.faults = Faults(self.timeline, self.lifecycle, self.stores, seed)

    def run(self, workload: Iterable[Asked], progress: Callable[[float], None] = lambda now: None) -> None:
        """Run until every request has ended and nothing is on its way. `progress` is called with simulated seconds."""
        for role in WorkerRole:
            self.lifecycle.begin(role, self._fleet.group(role))
        self.faults.begin(self._fleet.faults)
        if self._fleet.autoscale:
            self.timeline.every(self._fleet.scheduler.scaling.period_seconds, self.lifecycle.scale)
        self.timeline.every(1.0, lambda: progress(self.timeline.now))
        arrivals = _Arrivals(self.timeline, iter(workload), self.gateway.ask)
        self.timeline.run(lambda: bool(arrivals.more or self.gateway.live))
        self.timeline.run_until(self.timeline.now + SETTLE_SECONDS)
        for worker in self._by_id.values():
            worker.settle()

    def held_blocks(self) -> int:
        """Blocks of living workers that are held; 0 once all requests have ended."""
        return sum(worker.rank.held_blocks for worker in self._by_id.values() if worker.rank is not None)

    def ranks(self, role: WorkerRole) -> int:
        """How many ranks one worker has."""
        return self._fleet.group(role).ranks

    def _make_stores(self) -> list[SimulatedStore]:
        config = self._fleet.stores
        rate = config.bytes_per_second or self._costs[WorkerRole.DECODE].fetch_bytes_per_second
        return [
            SimulatedStore(f"store-{number}", config.total_blocks, Link(self.timeline, rate))
            for number in range(config.replicas)
        ]

    def _make_worker(self, role: WorkerRole) -> SimulatedWorker:
        group, number = self._fleet.group(role), len(self.lifecycle.workers[role])
        slowness = group.slow_factor if self._slow.random() < group.slow else 1.0
        identity = WorkerIdentity(
            worker_id=f"{role.value}-{number:05}",
            incarnation="0",
            role=role,
            endpoint=f"{role.value}-{number:05}:1",
            model=MODEL,
            kv_namespace=self._namespace,
            context_tokens=self._fleet.context_tokens,
            total_blocks=group.total_blocks * group.ranks,
            max_requests=group.max_requests * group.ranks,
            ranks=group.ranks,
            can_prefill=group.can_prefill,
            vocabulary_size=VOCABULARY,
            block_bytes=self._fleet.block_bytes,
            layerwise_tokens=group.layerwise_tokens,
            slot_bytes=1 << 23,
            sparse_prefill=self._fleet.sparse_prefill.offered,
            worker_class="simulated",
            max_step_tokens=group.max_step_tokens,
            prompt_wait_steps=group.prompt_wait_steps,
            divided_tokens=group.parallel.divided_tokens,
            speed=self._ranks.speed(role, slowness),
        )
        worker = SimulatedWorker(
            self.timeline,
            identity,
            partial(self._ranks.make, role, slowness),
            partial(self._make_reporter, group.status_interval_seconds),
            self._offer,
            self._calls,
            self._fleet.decode_queue,
            self._fleet.prefill_queue,
        )
        self._by_id[identity.worker_id] = worker
        return worker

    def _make_reporter(
        self, interval_seconds: float, identity: WorkerIdentity, rank: SimulatedRank | Lockstep
    ) -> StatusReporter:
        registry, hints = self.scheduler.registry, self._fleet.scheduler.hints
        # A report is one call and takes half as long as a request does to reach a worker, which is two calls.
        way_seconds = self._call_seconds / 2
        return StatusReporter(
            self.timeline, registry, identity, interval_seconds, hints, way_seconds, rank.catch_up, rank.statuses
        )

    def _offer(self, result: StepResult) -> None:
        """Put full blocks into the store of their chain, after the time that a push to it takes."""
        if not self.stores:
            return
        costs, size_bytes = self._costs[WorkerRole.DECODE], self._fleet.block_bytes
        blocks = list(zip(result.stored_parents, result.stored_blocks, strict=True))

        def arrive() -> None:
            for parent, block_hash in blocks:
                store = self._store_of(parent, block_hash)
                if store is not None:
                    store.put(self._namespace, parent, block_hash)

        self.timeline.after(costs.push_ms(size_bytes * len(blocks)) / 1000, arrive)

    def _store_of(self, parent: bytes, block_hash: bytes) -> SimulatedStore | None:
        """The store that keeps the block's chain, chosen by the chain's root; None if no store is alive."""
        root = self._roots.get(parent, block_hash) if parent else block_hash
        self._roots[block_hash] = root
        return self._store_by_id.get(rendezvous((store.store_id for store in self.stores if store.alive), root) or "")


class _Arrivals:
    """Makes each request arrive at its time. Only the next arrival is in the timeline's heap at any moment."""

    def __init__(self, timeline: Timeline, workload: Iterator[Asked], ask: Callable[[Asked], None]) -> None:
        self.more = True
        self._timeline = timeline
        self._workload = workload
        self._ask = ask
        self._next()

    def _next(self) -> None:
        asked = next(self._workload, None)
        if asked is None:
            self.more = False
            return

        def arrive() -> None:
            self._ask(asked)
            self._next()

        self._timeline.at(asked.seconds, arrive)


def _costs(fleet: FleetConfig, group: GroupConfig) -> CostModel:
    path = group.costs or fleet.costs
    return CostModel() if path is None else load_costs(path).costs

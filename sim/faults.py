"""What goes wrong in a simulated fleet, and when."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from mesh.domain.workers import WorkerRole
from sim.fleet import Fault
from sim.lifecycle import Lifecycle
from sim.store import SimulatedStore
from sim.timeline import Timeline
from sim.worker import SimulatedWorker
from worker.watchdog import END_SECONDS, STALLED_SECONDS

HOUR = 3600.0


class Faults:
    """Carries out faults at their times, on workers and stores that a seeded generator picks."""

    def __init__(self, timeline: Timeline, lifecycle: Lifecycle, stores: Sequence[SimulatedStore], seed: int) -> None:
        self.happened = 0
        self._timeline = timeline
        self._lifecycle = lifecycle
        self._stores = stores
        self._generator = np.random.default_rng([seed, 1])

    def begin(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.at is not None:
                self._timeline.at(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
            if fault.per_hour:
                self._next(fault)

    def _next(self, fault: Fault) -> None:
        members = len(self._stores) if fault.role == "store" else len(self._lifecycle.workers[WorkerRole(fault.role)])
        if not members:
            return
        wait = float(self._generator.exponential(HOUR / fault.per_hour / members))

        def strike() -> None:
            self._strike(fault)
            self._next(fault)

        self._timeline.after(wait, strike)

    def _strike(self, fault: Fault) -> None:
        self.happened += 1
        if fault.role == "store":
            self._strike_store(fault)
            return
        role = WorkerRole(fault.role)
        if fault.kind == "upgrade":
            self._lifecycle.upgrade(role)
            return
        alive = [worker for worker in self._lifecycle.alive(role) if not worker.draining]
        if alive:
            self._strike_worker(fault, role, alive[int(self._generator.integers(len(alive)))])

    def _strike_worker(self, fault: Fault, role: WorkerRole, worker: SimulatedWorker) -> None:
        rank = worker.rank
        assert rank is not None
        match fault.kind:
            case "die":
                self._lifecycle.kill(worker, role)
            case "freeze":
                self._freeze(worker, role, fault.seconds)
            case "slow_link":
                for link in rank.links:
                    link.slowness = fault.factor
                    self._timeline.after(fault.seconds, partial(setattr, link, "slowness", 1.0))
            case _:
                rank.slow(fault.factor)
                self._timeline.after(fault.seconds, lambda: rank.slow(1.0))

    def _freeze(self, worker: SimulatedWorker, role: WorkerRole, seconds: float) -> None:
        """The rank makes no progress. Its service reports the stall and, if it lasts too long, ends the worker."""
        rank, reports = worker.rank, worker.reports
        assert rank is not None and reports is not None
        worker.freeze(seconds)

        def judge(stalled: bool, ends: bool) -> None:
            if worker.rank is not rank:
                return
            reports.set_stalled(stalled)
            if ends:
                self._lifecycle.kill(worker, role)

        if seconds > STALLED_SECONDS:
            self._timeline.after(STALLED_SECONDS, lambda: judge(True, False))
        if seconds > END_SECONDS:
            self._timeline.after(END_SECONDS, lambda: judge(True, True))
        else:
            self._timeline.after(seconds, lambda: judge(False, False))

    def _strike_store(self, fault: Fault) -> None:
        if not self._stores:
            return
        store = self._stores[int(self._generator.integers(len(self._stores)))]
        if fault.kind == "die":
            store.die()
            self._timeline.after(fault.seconds, store.restart)
        else:
            store.link.slowness = fault.factor
            self._timeline.after(fault.seconds, lambda: setattr(store.link, "slowness", 1.0))

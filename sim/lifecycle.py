"""Workers that come and go: after a death, by scaling, in an upgrade."""

from collections.abc import Callable, Sequence

from mesh.domain.workers import WorkerRole
from sim.fleet import GroupConfig
from sim.scheduling import SimulatedScheduler
from sim.timeline import Timeline
from sim.worker import SimulatedWorker


class Lifecycle:
    """Starts and stops workers of all roles. `make` makes one more worker of a role without starting it."""

    def __init__(
        self,
        timeline: Timeline,
        scheduler: SimulatedScheduler,
        model: str,
        make: Callable[[WorkerRole], SimulatedWorker],
        start_seconds: Callable[[WorkerRole], float],
    ) -> None:
        self.workers: dict[WorkerRole, list[SimulatedWorker]] = {role: [] for role in WorkerRole}
        # The number of living workers over time: (seconds, count) for each change.
        self.replicas: dict[WorkerRole, list[tuple[float, int]]] = {role: [] for role in WorkerRole}
        self._timeline = timeline
        self._scheduler = scheduler
        self._model = model
        self._make = make
        self._start_seconds = start_seconds
        self._starting: dict[WorkerRole, int] = dict.fromkeys(WorkerRole, 0)

    def alive(self, role: WorkerRole) -> list[SimulatedWorker]:
        return [worker for worker in self.workers[role] if worker.alive]

    def begin(self, role: WorkerRole, group: GroupConfig) -> None:
        """Start the fleet's first workers, which need no time to start."""
        for _ in range(group.replicas):
            worker = self._make(role)
            self.workers[role].append(worker)
            worker.start()
        self._note(role)

    def restart(self, worker: SimulatedWorker, role: WorkerRole) -> None:
        """Start a worker that has ended, after the time that this takes."""
        self._starting[role] += 1
        self._note(role)

        def start() -> None:
            self._starting[role] -= 1
            worker.start()
            self._note(role)

        self._timeline.after(self._start_seconds(role), start)

    def kill(self, worker: SimulatedWorker, role: WorkerRole) -> None:
        worker.die()
        self.restart(worker, role)

    def upgrade(self, role: WorkerRole) -> None:
        """One worker after the other drains, leaves and starts again."""
        self._upgrade_next(role, list(self.alive(role)))

    def scale(self) -> None:
        """Bring the replicas to what the scheduler wants of them."""
        for (_, role), wanted in self._scheduler.scaler.decided().items():
            serving = [worker for worker in self.alive(role) if not worker.draining]
            present = len(serving) + self._starting[role]
            for _ in range(wanted.replicas - present):
                self.restart(self._spare(role), role)
            # The last serving worker of a role is never given up.
            excess = min(present - wanted.replicas, len(serving) - 1)
            if excess > 0:
                for worker in self._cheapest(serving)[:excess]:
                    worker.drain(lambda role=role: self._note(role))  # type: ignore[misc]

    def _cheapest(self, serving: Sequence[SimulatedWorker]) -> list[SimulatedWorker]:
        """In the order in which Kubernetes would end their pods."""
        costs = self._scheduler.deletion_costs.now()
        return sorted(serving, key=lambda worker: costs.get(worker.identity.worker_id, 0.0))

    def _spare(self, role: WorkerRole) -> SimulatedWorker:
        worker = self._make(role)
        self.workers[role].append(worker)
        return worker

    def _upgrade_next(self, role: WorkerRole, rest: Sequence[SimulatedWorker]) -> None:
        if not rest:
            return
        worker = rest[0]
        if not worker.alive or worker.draining:
            self._upgrade_next(role, rest[1:])
            return

        def gone() -> None:
            self.restart(worker, role)
            self._timeline.after(self._start_seconds(role), lambda: self._upgrade_next(role, rest[1:]))

        worker.drain(gone)

    def _note(self, role: WorkerRole) -> None:
        self.replicas[role].append((self._timeline.now, len(self.alive(role))))

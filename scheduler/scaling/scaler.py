"""The wanted replicas of each role and model: keeps the last decision on each, and makes the next."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from mesh.domain.workers import WorkerRole, WorkerState
from mesh.observe.metrics import SCHEDULER_WANTED_REPLICAS
from scheduler.config import ObjectivesConfig, ScalingConfig
from scheduler.coordinator import Coordinator
from scheduler.placement.constants import Constants
from scheduler.registry import Registry
from scheduler.scaling.arrivals import Arrivals
from scheduler.scaling.needs import needs
from scheduler.scaling.replicas import WantedReplicas, decide

Key = tuple[str, WorkerRole]


class Scaler:
    """Keeps decisions by model and role. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        registry: Registry,
        coordinator: Coordinator,
        arrivals: Arrivals,
        constants: Constants,
        objectives: ObjectivesConfig,
        config: ScalingConfig,
        clock: Callable[[], float],
    ) -> None:
        self.arrivals = arrivals
        self._registry = registry
        self._coordinator = coordinator
        self._constants = constants
        self._objectives = objectives
        self._config = config
        self._clock = clock
        self._started = clock()
        self._decided: dict[Key, WantedReplicas] = {}

    def decided(self) -> dict[Key, WantedReplicas]:
        """Decide again, and return what is wanted now."""
        now = self._clock()
        live = {worker.identity.model for worker in self._registry.workers()}
        for model in sorted(live | self.arrivals.models()):
            for role, wanted in self._decide(model, now).items():
                self._decided[model, role] = wanted
                SCHEDULER_WANTED_REPLICAS.labels(model, role.value).set(wanted.replicas)
        return dict(self._decided)

    def replicas(self, role: WorkerRole, model: str | None) -> int:
        """Replicas wanted of a role, for one model or for all."""
        decided = self.decided()
        return sum(
            wanted.replicas for (name, each), wanted in decided.items() if each is role and model in (None, name)
        )

    def serving(self, model: str, role: WorkerRole) -> int:
        """Live replicas that take requests."""
        workers = [worker for worker in self._registry.serving_model(model) if worker.identity.role is role]
        return sum(worker.state is WorkerState.SERVING for worker in workers)

    async def run(self, period_seconds: float) -> None:
        """Decide periodically, so that decisions do not depend on how often they are asked for."""
        while True:
            self.decided()
            await asyncio.sleep(period_seconds)

    def _decide(self, model: str, now: float) -> dict[WorkerRole, WantedReplicas]:
        found = needs(
            self._coordinator.candidates(model),
            self.arrivals.demand(model),
            self._coordinator.mean_output_tokens(model),
            self._constants,
            self._objectives,
            self._config,
        )
        return {role: decide(self._before(model, role, now), each, now, self._config) for role, each in found.items()}

    def _before(self, model: str, role: WorkerRole, now: float) -> WantedReplicas:
        """The last decision. A scheduler that has just started keeps at first as many replicas as it finds, since an
        earlier scheduler wanted them.
        """
        before = self._decided.get((model, role), WantedReplicas(0))
        if now - self._started >= self._config.scale_in_seconds:
            return before
        return replace(before, replicas=max(before.replicas, self.serving(model, role)))

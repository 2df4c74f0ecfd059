"""The scheduler of a simulated fleet: the product's parts, with simulated time as their clock."""

from collections.abc import Sequence

from mesh.costs import CostModel
from mesh.domain.placement import AttemptReport, PlacementQuery
from mesh.errors import MeshError, Retry
from scheduler.coordinator import Coordinator, ExplainedPlacement
from scheduler.decisions import DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.placement.constants import constants_of
from scheduler.registry import Registry
from scheduler.scaling.arrivals import Arrivals
from scheduler.scaling.deletion_costs import DeletionCosts
from scheduler.scaling.scaler import Scaler
from scheduler.stores import Store, Stores
from scheduler.tenants import PlacedRequests
from sim.fleet import SchedulingConfig
from sim.timeline import Timeline

FIRST_ATTEMPT = 1
# The decisions of a simulation are not listed.
KEPT_DECISIONS = 1


class MostOutput(OutputLengths):
    """Gives an infinite mean, so that placement expects as many tokens as a request may have at most."""

    def mean(self, model: str) -> float | None:
        return float("inf")


class SimulatedScheduler:
    """Places without taking simulated time: the cost model includes the time of the call."""

    def __init__(self, timeline: Timeline, config: SchedulingConfig, costs: CostModel, stores: Sequence[Store]) -> None:
        constants = constants_of(config.placement, costs)
        self.registry = Registry(timeline, config.lease, constants.costs)
        lengths = MostOutput() if config.assumed_output == "most" else OutputLengths()
        self._coordinator = Coordinator(
            self.registry,
            Stores(stores),
            config.store_link.ignored_blocks,
            PlacedRequests(timeline),
            DecisionLog(KEPT_DECISIONS),
            lengths,
            constants,
            config.objectives,
            timeline,
        )
        scaling = config.scaling
        self.scaler = Scaler(
            self.registry,
            self._coordinator,
            Arrivals(timeline, scaling.arrivals_seconds),
            constants,
            config.objectives,
            scaling,
            timeline,
        )
        self.deletion_costs = DeletionCosts(self.registry, self._coordinator, constants)
        self.placements = 0

    def place(self, query: PlacementQuery) -> ExplainedPlacement:
        """Raises MeshError as the service does."""
        self.placements += 1
        first = query.attempt == FIRST_ATTEMPT
        try:
            answer = _finish(self._coordinator, query)
        except MeshError as error:
            if first and error.retry is not Retry.NEVER:
                self.scaler.arrivals.refused(query.model, query.prompt_tokens)
            raise
        if first:
            self.scaler.arrivals.placed(query.model, query.prompt_tokens, answer.chosen.uncached_tokens)
        return answer

    def report(self, report: AttemptReport) -> None:
        self._coordinator.report(report)


def _finish(coordinator: Coordinator, query: PlacementQuery) -> ExplainedPlacement:
    """Run the coroutine to its end without an event loop, since simulated stores answer without waiting."""
    placing = coordinator.place(query)
    try:
        placing.send(None)
    except StopIteration as done:
        answer: ExplainedPlacement = done.value
        return answer
    raise AssertionError("a placement waited for something outside the simulation")

"""The constants of the prediction: a mesh's costs, and the configuration of placement."""

from dataclasses import dataclass, field

import msgspec

from mesh.cost_file import load_costs
from mesh.costs import CostModel
from scheduler.config import PlacementConfig


@dataclass(frozen=True, slots=True)
class Constants:
    # How times grow with the work, and the times to assume while a worker has not measured its own.
    costs: CostModel = field(default_factory=CostModel)
    config: PlacementConfig = field(default_factory=PlacementConfig)


def constants_of(config: PlacementConfig, assumed: CostModel | None = None) -> Constants:
    """The constants, with the cost file's content, or with `assumed` if there is none. Raises ConfigError."""
    costs = assumed or CostModel()
    if config.costs is not None:
        costs = load_costs(config.costs).costs
    if config.handover_ms is not None:
        costs = msgspec.structs.replace(costs, handover_ms=config.handover_ms)
    return Constants(costs, config)

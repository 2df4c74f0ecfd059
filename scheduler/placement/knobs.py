"""Turns the configuration of placement into its constants."""

import msgspec

from mesh.cost_file import load_costs
from mesh.costs import CostModel
from scheduler.config import PlacementConfig
from scheduler.placement.candidates import PlacementKnobs


def placement_knobs(config: PlacementConfig, assumed: CostModel | None = None) -> PlacementKnobs:
    """The constants, with the cost file's content, or with `assumed` if there is none. Raises ConfigError."""
    costs = assumed or CostModel()
    if config.costs is not None:
        costs = load_costs(config.costs).costs
    if config.handover_ms is not None:
        costs = msgspec.structs.replace(costs, handover_ms=config.handover_ms)
    return PlacementKnobs(costs=costs, **config.model_dump(exclude={"costs", "handover_ms"}))

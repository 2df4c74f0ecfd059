"""Configuration of how a worker's ranks share the load of routed experts."""

from pathlib import Path

from pydantic import Field

from mesh.config import Config


class BalanceConfig(Config):
    """Matters to workers of several ranks only."""

    interval_steps: int | None = Field(default=None, ge=16)
    """After so many steps the ranks look at which experts tokens chose, and move experts if that evens the load; None
    leaves the experts where they are.
    """
    redundant: int = Field(default=0, ge=0)
    """Room on each part of the experts (`engine.parallel.ep`) for so many copies of experts that many tokens choose."""
    threshold: float = Field(default=0.1, gt=0)
    """Experts of a layer move if they lower its imbalance, (largest - mean) / mean of the parts' load, by this much."""
    placement_file: Path | None = None
    """Experts start as it says, if it exists; written whenever they have been moved."""

"""Configuration of how a worker's ranks share the load of routed experts."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mesh.config import Config

# Steps between looks if `interval_steps` is "auto": tens of seconds, in which an expert is chosen thousands of times.
AUTO_INTERVAL = 1000


class BalanceConfig(Config):
    """Matters to workers of several ranks only."""

    interval_steps: Annotated[int, Field(ge=16)] | Literal["auto"] | None = "auto"
    """After this many steps the ranks look at which experts tokens chose, and move experts if that evens the load; null
    leaves the experts where they are. They look sooner at first, after 64, 128, ... steps. "auto": 1000 for several dp
    ranks of one host with all experts in their memory, else null.
    """
    redundant: int = Field(default=0, ge=0)
    """How many copies of often chosen experts have room on each part of the experts (`engine.parallel.ep`)."""
    groups_on_hosts: bool = False
    """Keep each group of experts with its copies on one host, if the hosts can share the groups evenly, as DeepSeek's
    EPLB does for prompts. Tokens, whose experts are all of a few groups, then go to fewer hosts with DeepEP, but loads
    are less even; without it they go to all hosts in any case.
    """
    threshold: float = Field(default=0.1, gt=0)
    """Experts of a layer move if that lowers the layer's imbalance, (largest - mean) / mean of its parts' load, by more
    than this.
    """
    placement_file: Path | None = None
    """File with the placement that experts start with, if it exists; it is written whenever experts have moved."""

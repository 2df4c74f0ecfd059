"""Which rank holds what. Pure."""

from dataclasses import dataclass
from enum import Enum

from engine.parallel.config import ParallelConfig


class Group(Enum):
    """Ranks that a rank exchanges tensors with, itself included."""

    # All ranks of the worker, which together hold the routed experts.
    WORLD = "world"
    # The ranks that compute its requests with it: neighbours, the first of which leads.
    TP = "tp"


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ways each kind of weight is divided. Rank = DP index * tp + TP index."""

    tp: int = 1
    dp: int = 1
    # Divides tp * dp.
    ep: int = 1
    # Each host has the same number of neighbouring ranks, and whole TP groups.
    hosts: int = 1

    @classmethod
    def of(cls, config: ParallelConfig) -> "Layout":
        """Sizes that are not set are chosen as for a worker that decodes."""
        world = config.world
        tp = config.tp or world // (config.dp or world)
        return cls(tp, world // tp, config.ep or world, config.hosts)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    @property
    def ranks_a_host(self) -> int:
        return self.world // self.hosts

    @property
    def of_a_host(self) -> "Layout":
        """The ranks of one host as if there were no other host. It does not say which experts they hold."""
        return Layout(self.tp, self.dp // self.hosts, self.ranks_a_host)

    @property
    def hosts_of_parts(self) -> int:
        """Hosts, if each has equally many whole parts of the experts; else 1, as if all parts lay on one."""
        return self.hosts if self.ep % self.hosts == 0 else 1

    @property
    def width_parts(self) -> int:
        """Into how many parts the width of a routed expert is divided."""
        return self.world // self.ep


@dataclass(frozen=True, slots=True)
class Place:
    """One rank in its worker's layout."""

    layout: Layout = Layout()
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.layout.world

    @property
    def tp_index(self) -> int:
        """Which of its TP group's shares of heads, of dense layers and of the vocabulary it holds."""
        return self.rank % self.layout.tp

    @property
    def dp_index(self) -> int:
        """Whose requests it computes."""
        return self.rank // self.layout.tp

    @property
    def leads(self) -> bool:
        """Whether it batches requests; the others of its TP group follow it."""
        return self.tp_index == 0

    @property
    def host(self) -> int:
        return self.rank // self.layout.ranks_a_host

    @property
    def on_host(self) -> "Place":
        """Its place among the ranks of its host alone."""
        if self.layout.hosts == 1:
            return self
        return Place(self.layout.of_a_host, self.rank % self.layout.ranks_a_host)

    @property
    def expert_part(self) -> int:
        """Which of the `ep` parts of the experts it holds; neighbours share a part."""
        return self.rank // self.layout.width_parts

    @property
    def width_part(self) -> int:
        """Which part of the width of its experts it holds."""
        return self.rank % self.layout.width_parts

    def members(self, group: Group) -> range:
        """The ranks of the group, in order."""
        if group is Group.WORLD:
            return range(self.layout.world)
        first = self.dp_index * self.layout.tp
        return range(first, first + self.layout.tp)

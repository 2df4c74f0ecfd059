"""The GPUs of this machine, and which worker gets which. Without torch, which the supervisor does not load."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.settings.card import find_cards
from mesh.errors import ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """A worker's GPU, or its first one. Names are those that CUDA_VISIBLE_DEVICES takes: an index or a UUID."""

    name: str
    # The mesh's other GPUs, which stay visible after it: a process may have to see a GPU whose memory it maps.
    others: tuple[str, ...] = ()
    # How many workers share the GPU.
    workers: int = 1
    # The worker's ranks, one on each GPU: its further GPUs are the first of `others`.
    ranks: int = 1

    @property
    def own(self) -> tuple[str, ...]:
        return (self.name, *self.others[: self.ranks - 1])

    @property
    def environment(self) -> dict[str, str]:
        """The environment that makes this GPU the first device of a process."""
        return {VISIBLE_DEVICES: ",".join((self.name, *self.others))}


def find_gpus() -> tuple[str, ...]:
    """The GPUs that processes started from here can use, by name, in CUDA's order; empty without a driver."""
    return name_gpus(len(find_cards()), os.environ.get(VISIBLE_DEVICES))


def name_gpus(count: int, visible: str | None) -> tuple[str, ...]:
    """The first `count` names in `visible`, the value of CUDA_VISIBLE_DEVICES; indices if that is not set."""
    names = map(str, range(count)) if visible is None else map(str.strip, visible.split(","))
    return tuple(names)[:count]


def assign(workers: Mapping[str, int], gpus: Sequence[str]) -> dict[str, Gpu]:
    """Give each worker a GPU for each of its ranks, starting over with the first GPU after the last; empty without
    GPUs.

    workers: number of ranks by worker name. Raises ConfigError if a worker has more ranks than there are GPUs.
    """
    if not gpus:
        return {}
    starts = list(accumulate(workers.values(), initial=0))
    sharing = [len(range(index, starts[-1], len(gpus))) for index in range(len(gpus))]
    assigned = {}
    for start, (worker, ranks) in zip(starts, workers.items(), strict=False):
        if ranks > len(gpus):
            raise ConfigError(f"{worker} has {ranks} ranks, each on a GPU of its own, and there are {len(gpus)} GPUs")
        order = [(start + place) % len(gpus) for place in range(len(gpus))]
        first, *others = (gpus[index] for index in order)
        assigned[worker] = Gpu(first, tuple(others), max(sharing[index] for index in order[:ranks]), ranks)
    return assigned

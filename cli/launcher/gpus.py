"""The GPUs of this machine, and which worker gets which. Without torch: the supervisor does not load it."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_DRIVER = "libcuda.so.1"
_SUCCESS = 0


@dataclass(frozen=True)
class Gpu:
    """A worker's GPU. Names are those that CUDA_VISIBLE_DEVICES takes: an index or a UUID."""

    name: str
    # The others of the mesh, which stay visible behind it: a process may have to see the GPU whose memory it maps.
    others: tuple[str, ...] = ()
    # How many workers share it.
    workers: int = 1

    @property
    def environment(self) -> dict[str, str]:
        """The environment that makes this GPU the first device of a process."""
        return {VISIBLE_DEVICES: ",".join((self.name, *self.others))}


def find_gpus() -> tuple[str, ...]:
    """The GPUs that processes started from here can use, by name, in CUDA's order; none without a driver."""
    return name_gpus(_count_gpus(), os.environ.get(VISIBLE_DEVICES))


def name_gpus(count: int, visible: str | None) -> tuple[str, ...]:
    """The first `count` names of `visible`, the value of CUDA_VISIBLE_DEVICES; indices if that is not set."""
    names = map(str, range(count)) if visible is None else map(str.strip, visible.split(","))
    return tuple(names)[:count]


def assign(workers: Sequence[str], gpus: Sequence[str]) -> dict[str, Gpu]:
    """Give the workers the GPUs in turn, beginning again with the first GPU after the last; empty without GPUs."""
    if not gpus:
        return {}
    sharing = [len(range(index, len(workers), len(gpus))) for index in range(len(gpus))]
    assigned = {}
    for number, worker in enumerate(workers):
        index = number % len(gpus)
        others = (*gpus[index + 1 :], *gpus[:index])
        assigned[worker] = Gpu(gpus[index], others, sharing[index])
    return assigned


def _count_gpus() -> int:
    """The driver's count, which heeds CUDA_VISIBLE_DEVICES and leaves out what a container hides."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return 0
    return count.value

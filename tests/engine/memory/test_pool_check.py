"""A pool next to which the largest steps do not run is made smaller, or the start is refused."""

import logging
from collections.abc import Callable

import pytest
import torch

from engine.memory.pool_check import SPARE, Serving, lacking_bytes, settle_pool
from engine.memory.pool_plan import PoolPlan
from mesh.errors import ConfigError, EngineFailed

PLAN = PoolPlan(block_bytes=64, total_blocks=1000, foreign_blocks=100, context_tokens=20_000)


class Device:
    """A device that lacks memory next to large pools, at one of several places."""

    def __init__(
        self, most: int, *, step_fails_above: int = 1 << 30, error: RuntimeError | None = None, making: bool = False
    ) -> None:
        """most: blocks next to which a rehearsal succeeds, which says what lacks; making: whether it is the pool that
        cannot be made.
        """
        self._most, self._steps, self._making = most, step_fails_above, making
        self._error = error or torch.OutOfMemoryError("no memory")
        self.pools: list[PoolPlan] = []
        self.freed = 0

    @property
    def serving(self) -> Serving:
        return Serving(self._make, self._rehearse, self._run, self._free)

    def _rehearse(self) -> int:
        return max(self.pools[-1].total_blocks - self._most, 0) * PLAN.block_bytes

    def _make(self, pool: PoolPlan) -> None:
        self.pools.append(pool)
        if self._making and pool.total_blocks > self._most:
            raise self._error

    def _run(self) -> None:
        if self.pools[-1].total_blocks > self._steps:
            raise self._error

    def _free(self) -> None:
        self.freed += 1


def settle(device: Device, agree: Callable[[int], int] = int, *, given: bool = False, alone: bool = True) -> PoolPlan:
    return settle_pool(PLAN, device.serving, agree, given=given, alone=alone)


def test_a_pool_that_leaves_room_stays_as_planned(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(1000)
    assert settle(device) == PLAN
    assert (len(device.pools), device.freed, caplog.records) == (1, 0, [])


@pytest.mark.parametrize(
    "device",
    [
        Device(1000, step_fails_above=800),
        Device(800, making=True),
        Device(1000, step_fails_above=800, error=RuntimeError("CUDA error: out of memory")),
    ],
    ids=["step", "pool", "driver"],
)
def test_a_pool_is_smaller_with_one_warning_if_memory_lacks(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = settle(device)
    assert [pool.total_blocks for pool in device.pools] == [1000, 900, 810, 729]
    assert (found.total_blocks, found.foreign_blocks, found.context_tokens) == (729, 72, 20_000)
    (record,) = caplog.records
    assert vars(record)["fields"] == {"planned": 1000, "blocks": 729}
    assert device.freed == 3


@pytest.mark.parametrize(("most", "blocks"), [(970, [1000, 970]), (800, [1000, 900, 810, 800])])
def test_a_pool_gives_up_the_blocks_that_lack(most: int, blocks: list[int]) -> None:
    device = Device(most)
    settle(device)
    assert [pool.total_blocks for pool in device.pools] == blocks


def test_ranks_follow_the_one_that_lacks_memory() -> None:
    """This rank has room for all; another has room for 950 blocks."""
    device, other = Device(1000), Device(950)

    def agree(least: int) -> int:
        other.pools = device.pools
        return min(least, -other.serving.rehearse())

    assert settle(device, agree=agree, alone=False).total_blocks == 950


def test_a_rank_that_others_wait_for_ends_with_a_remedy() -> None:
    with pytest.raises(EngineFailed, match=r"next to 1000 blocks of KV: set engine\.total_blocks to 900, or lower"):
        settle(Device(1000, step_fails_above=800), alone=False)


def test_a_given_size_is_refused_with_one_that_may_fit() -> None:
    with pytest.raises(ConfigError, match=r"total_blocks=1000 leaves the largest steps no memory: lower it to 970"):
        settle(Device(970), given=True)


def test_steps_that_fit_next_to_no_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lower engine\.max_step_tokens or engine\.max_requests"):
        settle(Device(1))


def test_another_error_is_no_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        settle(Device(1000, step_fails_above=1, error=RuntimeError("an illegal memory access")))


def test_a_shorter_pool_has_shorter_requests() -> None:
    assert PLAN.with_blocks(100).context_tokens == 6400


def test_a_cpu_is_not_asked_for_memory() -> None:
    assert lacking_bytes(1 << 60, torch.device("cpu")) == 0


@pytest.mark.gpu
def test_a_gpu_says_what_lacks() -> None:
    size = 2 * torch.cuda.get_device_properties(0).total_memory
    lacks = lacking_bytes(size, torch.device("cuda"))
    assert size / 2 < lacks < size * (1 + SPARE)
    assert lacking_bytes(1 << 20, torch.device("cuda")) == 0

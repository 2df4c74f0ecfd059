"""Whether a rank's largest steps run next to its KV pool, and a smaller pool if they do not."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.memory.full_gpu import lacks_memory
from engine.memory.pool_plan import PoolPlan
from mesh.errors import ConfigError, EngineFailed

_log = logging.getLogger("deepmesh.engine")

# Each attempt has at most this share of the blocks of the one before, if it is not known how much memory lacks.
SMALLER = 0.9
# What is given up besides the memory that lacks, as a share of what steps take: each attempt captures all graphs again.
SPARE = 0.05
# After the last one less than half of the planned blocks are left: then something else is wrong.
ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves from a pool, as calls that all ranks of a worker make at once."""

    # Makes the pool, steps over it and their graphs.
    make: Callable[[PoolPlan], None]
    # How many bytes of the memory that steps need cannot be had. Exchanges nothing with other ranks.
    rehearse: Callable[[], int]
    # Runs the largest step of each kind.
    run_largest_steps: Callable[[], None]
    # Gives up what was made.
    free: Callable[[], None]


def settle_pool(
    pool: PoolPlan, serving: Serving, agree: Callable[[int], int], *, given: bool, alone: bool, tells: bool = True
) -> PoolPlan:
    """Make what serves, with fewer blocks if the largest steps do not run next to the pool. Returns the pool.

    agree: the least of all ranks' numbers. given: whether the configuration says how many blocks there are. alone:
    whether the worker has one rank; of several, one that lacks memory in the middle of a step leaves the others waiting
    for it, and cannot try again. tells: whether this rank warns of a smaller pool; all have the same.

    Raises ConfigError if the steps do not fit however small the pool is, or if its size was given; EngineFailed if one
    of several ranks lacked memory in a step.
    """
    planned = pool.total_blocks
    for _ in range(ATTEMPTS):
        fewer = _blocks_too_many(pool, serving, agree, alone=alone)
        if not fewer:
            if tells and pool.total_blocks < planned:
                _log.warning(
                    "the KV pool has fewer blocks than planned: the largest steps did not fit next to it",
                    extra={"fields": {"planned": planned, "blocks": pool.total_blocks}},
                )
            return pool
        serving.free()
        smaller = pool.total_blocks - fewer
        if given:
            raise ConfigError(
                f"engine.total_blocks={planned} leaves the largest steps no memory: lower it to {smaller}, or leave it"
                " out"
            )
        if smaller < 2:
            break
        pool = pool.with_blocks(smaller)
    raise ConfigError(
        f"the largest steps do not fit next to {pool.total_blocks} blocks of KV: lower engine.max_step_tokens or"
        " engine.max_requests, or free memory of the GPU"
    )


def lacking_bytes(size_bytes: int, device: torch.device) -> int:
    """How much is lacking for this much memory to be had at once; 0 if it can be had. A CPU grants memory when it is
    written, and is not asked.
    """
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    try:
        torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info(device)
        return max(size_bytes - free, 0) + int(size_bytes * SPARE)
    return 0


def _blocks_too_many(pool: PoolPlan, serving: Serving, agree: Callable[[int], int], *, alone: bool) -> int:
    """0 if the largest steps run next to the pool."""
    unknown = pool.total_blocks - int(pool.total_blocks * SMALLER)
    try:
        serving.make(pool)
        # Agreed on before any rank runs a step, in which ranks wait for one another.
        if lacking := -agree(-serving.rehearse()):
            return min(-(-lacking // pool.block_bytes), unknown)
        serving.run_largest_steps()
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        if not alone:
            raise EngineFailed(
                f"no memory for the largest steps next to {pool.total_blocks} blocks of KV: set engine.total_blocks to"
                f" {int(pool.total_blocks * SMALLER)}, or lower engine.max_step_tokens"
            ) from error
        return unknown
    return 0

"""Whether KV blocks fit into memory, and how much host memory a rank takes for them. Without torch, for the oracle."""

import logging
from collections.abc import Callable
from typing import Literal

import psutil

from engine.config import EngineConfig
from engine.moves.host_slots import HostSlots
from mesh.errors import ConfigError, EngineFailed

_log = logging.getLogger("deepmesh.engine")

# Part of the available memory that blocks in host memory get by default, divided among the ranks of a host. They take
# it only as they are written.
HOST_SHARE = 0.1


def check_room(total_blocks: int, block_bytes: int, there_bytes: int) -> None:
    """Raises ConfigError if a pool of this many blocks takes more than there is."""
    if total_blocks * block_bytes > there_bytes:
        asked, there = (f"{size / 1e9:,.1f} GB" for size in (total_blocks * block_bytes, there_bytes))
        raise ConfigError(
            f"engine.total_blocks={total_blocks} takes {asked} and {there} are free: lower it to"
            f" {there_bytes // block_bytes}, or leave it out"
        )


def host_slots(
    config: EngineConfig,
    device: Literal["cpu", "cuda", "oracle"],
    block_bytes: int,
    make: Callable[[int], HostSlots],
) -> HostSlots | None:
    """Host memory for the blocks that a rank's pool evicts; None if there is to be none. If it cannot be had, a warning
    says so, and the rank does without.

    make: takes the number of blocks, and raises MemoryError or EngineFailed if there is no memory for them.
    """
    there_bytes = psutil.virtual_memory().available // config.parallel.ranks_a_host
    count = _blocks(config, device, there_bytes // block_bytes)
    if not count:
        return None
    why = f"{there_bytes / 1e9:,.1f} GB are available"
    if count * block_bytes <= there_bytes:
        try:
            return make(count)
        except MemoryError:
            why = "the system grants no such memory"
        except EngineFailed as error:
            why = error.message
    size = f"{count * block_bytes / 1e9:,.1f} GB"
    _log.warning(
        "no blocks are kept in host memory: lower engine.host_blocks, or free memory",
        extra={"fields": {"blocks": count, "size": size, "why": why}},
    )
    return None


def _blocks(config: EngineConfig, device: Literal["cpu", "cuda", "oracle"], there_blocks: int) -> int:
    """there_blocks: as many as would fill the available memory."""
    if config.host_blocks != "auto":
        return config.host_blocks
    # None on a GPU until the copies through page-locked memory have run on one; then its share will be the same. The
    # oracle's blocks have so few bytes that its share would be millions of them.
    return int(there_blocks * HOST_SHARE) if device == "cpu" and config.prefix_cache else 0

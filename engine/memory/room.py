"""Whether KV blocks fit into memory, and how much host memory a rank takes for them. Without torch, for the oracle."""

import logging
from collections.abc import Callable
from typing import Literal

from engine.config import EngineConfig
from engine.moves.host_slots import HostSlots
from mesh.errors import ConfigError, EngineFailed
from mesh.memory.machine_memory import machine_memory

_log = logging.getLogger("deepmesh.engine")

# Part of the available memory that blocks in host memory get by default, divided among the TP groups of a host: only
# the first rank of a group keeps blocks. On a CPU they take it only as they are written.
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
    there_bytes = machine_memory().room // config.parallel.groups_a_host
    count = _blocks(config, device, there_bytes // block_bytes)
    if not count:
        return None
    size, why = f"{count * block_bytes / 1e9:,.1f} GB", f"{there_bytes / 1e9:,.1f} GB are available"
    if count * block_bytes <= there_bytes:
        try:
            slots = make(count)
            _log.info("evicted blocks are kept in host memory", extra={"fields": {"blocks": count, "size": size}})
            return slots
        except MemoryError:
            why = "the system grants no such memory"
        except EngineFailed as error:
            why = error.message
    _log.warning(
        "no blocks are kept in host memory: lower engine.host_blocks, or free memory",
        extra={"fields": {"blocks": count, "size": size, "why": why}},
    )
    return None


def _blocks(config: EngineConfig, device: Literal["cpu", "cuda", "oracle"], there_blocks: int) -> int:
    """there_blocks: as many as would fill the available memory."""
    if config.host_blocks != "auto":
        return config.host_blocks
    # The oracle's blocks have so few bytes that its share would be millions of them.
    return int(there_blocks * HOST_SHARE) if device != "oracle" and config.prefix_cache else 0

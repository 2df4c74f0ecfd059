"""How much memory a store takes for blocks."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from kvstore.config import KvStoreConfig

# Most blocks of a store whose size is not set: what it keeps of each is allocated at once. 16 million tokens.
MOST_BLOCKS = 1 << 18
_GIB = 1 << 30
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class MachineMemory:
    """Memory in bytes: what is available on the machine, and the container's limit, None if it has none."""

    available: int
    limit: int | None


@dataclass(frozen=True)
class StoreSize:
    """Bytes for blocks, and why as many."""

    memory_bytes: int
    reason: str


def store_size(config: KvStoreConfig, block_bytes: int, machine: MachineMemory) -> StoreSize:
    """`config.memory_bytes`, or the share of what the machine and the container have."""
    if config.memory_bytes is not None:
        return StoreSize(config.memory_bytes, "memory_bytes is set")
    room, whose = machine.available, "the machine's available memory"
    if machine.limit is not None and machine.limit < room:
        room, whose = machine.limit, "the container's limit"
    share, most = int(room * config.memory_share), MOST_BLOCKS * block_bytes
    if share > most:
        return StoreSize(most, f"{MOST_BLOCKS:,} blocks are the most unless memory_bytes is set")
    return StoreSize(share, f"memory_share is {config.memory_share:g}, and {whose} {room / _GIB:.1f} GiB")


def machine_memory() -> MachineMemory:
    """What this process could take now."""
    return MachineMemory(psutil.virtual_memory().available, group_limit(_OWN_GROUP, _CONTROL_GROUPS))


def group_limit(own_group: Path, groups: Path) -> int | None:
    """The lowest memory limit of this process's control group (version 2) and its parents.

    own_group: a file as /proc/self/cgroup; groups: where the groups are mounted.
    """
    try:
        lines = own_group.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    own = groups / path
    found = [_limit(each / "memory.max") for each in (own, *own.parents) if each.is_relative_to(groups)]
    return min((limit for limit in found if limit is not None), default=None)


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

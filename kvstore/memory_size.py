"""How much memory a store takes for blocks."""

from dataclasses import dataclass

from kvstore.config import KvStoreConfig
from mesh.memory.machine_memory import MachineMemory

# Most blocks of a store whose size is not set: what it keeps of each is allocated at once. 16 million tokens.
MOST_BLOCKS = 1 << 18
_GIB = 1 << 30


@dataclass(frozen=True)
class StoreSize:
    """Bytes for blocks, and why as many."""

    memory_bytes: int
    reason: str


def store_size(config: KvStoreConfig, block_bytes: int, machine: MachineMemory) -> StoreSize:
    """`config.memory_bytes`, or the share of what the machine and the container have."""
    if config.memory_bytes is not None:
        return StoreSize(config.memory_bytes, "memory_bytes is set")
    whose = "the machine's available memory" if machine.room == machine.available else "the container's limit"
    share, most = int(machine.room * config.memory_share), MOST_BLOCKS * block_bytes
    if share > most:
        return StoreSize(most, f"{MOST_BLOCKS:,} blocks are the most unless memory_bytes is set")
    return StoreSize(share, f"memory_share is {config.memory_share:g}, and {whose} {machine.room / _GIB:.1f} GiB")

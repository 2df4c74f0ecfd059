import pytest

from kvstore.config import KvStoreConfig
from kvstore.memory_size import MOST_BLOCKS, store_size
from mesh.memory.machine_memory import MachineMemory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("config", "machine", "expected", "reason"),
    [
        (KvStoreConfig(memory_bytes=1 << 20), MachineMemory(64 * GIB, None), 1 << 20, "memory_bytes is set"),
        (KvStoreConfig(), MachineMemory(64 * GIB, None), 16 * GIB, "machine's available memory 64.0 GiB"),
        (KvStoreConfig(), MachineMemory(64 * GIB, 8 * GIB), 2 * GIB, "container's limit 8.0 GiB"),
        (KvStoreConfig(), MachineMemory(4 * GIB, 8 * GIB), GIB, "machine's available memory 4.0 GiB"),
        (KvStoreConfig(memory_share=0.5), MachineMemory(4 * GIB, None), 2 * GIB, "memory_share is 0.5"),
    ],
    ids=["set", "machine", "container", "limit above the machine", "share"],
)
def test_a_store_takes_its_share(config: KvStoreConfig, machine: MachineMemory, expected: int, reason: str) -> None:
    size = store_size(config, 1 << 20, machine)
    assert size.memory_bytes == expected
    assert reason in size.reason


def test_small_blocks_bound_a_stores_share() -> None:
    size = store_size(KvStoreConfig(), 512, MachineMemory(1024 * GIB, None))
    assert size.memory_bytes == MOST_BLOCKS * 512
    assert "262,144 blocks are the most" in size.reason

"""How many blocks the KV pool gets: what is left when weights, the largest step and the captured graphs have theirs."""

import psutil
import torch

from mesh.errors import ConfigError
from transfer.config import TransferConfig

# On CPU the pool takes no more than this unless one whole context needs it, or `total_blocks` asks for it.
CPU_POOL_BYTES = 1 << 30
# Each KiB that is staged has 64 bytes of sums.
STAGED_BYTES_PER_SUM_BYTE = 16
# What CUDA and its libraries take in each process that computes on a GPU, beside what torch knows of.
LIBRARY_BYTES = 1 << 30


def free_bytes(device: torch.device, share: float = 1.0) -> int:
    """Memory that this process can still allocate on the device, what torch keeps for later included.

    With a `share` of a GPU below 1, no more than is left of that: others that load now have not taken theirs yet.
    """
    if device.type == "cpu":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share == 1:
        return free
    return min(free, left_of_share(total, share, torch.cuda.memory_reserved(device)))


def left_of_share(total_bytes: int, share: float, taken_bytes: int) -> int:
    """Of a GPU's memory, for one of the processes that share it, which has allocated so much already."""
    return max(int(total_bytes * share) - LIBRARY_BYTES - taken_bytes, 0)


def transfer_bytes(config: TransferConfig | None) -> int:
    """What transfers take of a GPU's memory: staging slots, and what their hashes are made of."""
    if config is None:
        return 0
    return config.slots * (config.slot_bytes + config.slot_bytes // STAGED_BYTES_PER_SUM_BYTE)


def affordable_blocks(
    *, budget_bytes: int, block_bytes: int, context_blocks: int, max_requests: int, cap_bytes: int | None
) -> int:
    """Blocks of the KV pool: what the budget holds, but no more than all requests at full context can use.

    `cap_bytes`, where given, limits it further, though never below one full context. Raises ConfigError where not even
    two blocks fit.
    """
    wanted = context_blocks * max_requests
    if cap_bytes is not None:
        wanted = min(wanted, max(cap_bytes // block_bytes, context_blocks))
    blocks = min(max(wanted, 2), budget_bytes // block_bytes)
    if blocks < 2:
        raise ConfigError(
            f"the KV pool may take {budget_bytes} bytes and one block of 64 tokens takes {block_bytes}:"
            " free memory, or raise engine.kv_memory_fraction"
        )
    return blocks

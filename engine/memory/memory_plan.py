"""How many blocks the KV pool gets: what weights, the largest step, captured graphs and transfers leave. Pure."""

from engine.config import EngineConfig
from mesh.blocks import blocks_for
from mesh.errors import ConfigError
from transfer.config import TransferConfig

# On a CPU the pool takes no more than this, unless one whole context needs more, or `total_blocks` asks for more.
CPU_POOL_BYTES = 1 << 30
# Hashing keeps 64 bytes for each KiB of staging.
STAGED_BYTES_PER_HASH_BYTE = 16
# Memory that CUDA and its libraries take in each process that computes on a GPU, unknown to torch.
LIBRARY_BYTES = 1 << 30
# What torch leaves to the driver while a worker serves, if steps do not need it.
DRIVER_BYTES = 512 << 20
# What the driver keeps of each layer of each captured step, unknown to torch: 0.59 GB for the 61 layers and 48 steps of
# DeepSeek-R1 on an H200.
CAPTURED_LAYER_BYTES = 200 << 10
# What blocks on their way to and from host memory take of a GPU: large enough that copies of a few MB each keep the
# link busy.
HOST_STAGING_BYTES = 64 << 20
# Share of what steps take that the allocator loses between them, in pieces that no tensor fits.
FRAGMENTATION = 0.1


def left_of_share(total_bytes: int, share: float, taken_bytes: int) -> int:
    """What a process that has allocated `taken_bytes` may still allocate of its share of a GPU's memory."""
    return max(int(total_bytes * share) - LIBRARY_BYTES - taken_bytes, 0)


def transfer_bytes(config: TransferConfig | None) -> int:
    """Memory of a GPU that transfers take: staging slots, and the state of their hashes."""
    if config is None:
        return 0
    return config.slots * (config.slot_bytes + config.slot_bytes // STAGED_BYTES_PER_HASH_BYTE)


def host_staged_blocks(block_bytes: int) -> int:
    """Blocks that may be on their way to or from host memory at a time."""
    return max(HOST_STAGING_BYTES // block_bytes, 1)


def copy_bytes(config: EngineConfig, block_bytes: int) -> int:
    """Memory of a GPU that copies of KV take: those of transfers, and those to and from host memory."""
    to_host = host_staged_blocks(block_bytes) * block_bytes if config.host_blocks and config.prefix_cache else 0
    return transfer_bytes(config.transfer) + to_host


def affordable_blocks(
    *, budget_bytes: int, block_bytes: int, context_blocks: int, max_requests: int, cap_bytes: int | None
) -> int:
    """Blocks of the KV pool: what the budget holds, but no more than all requests at full context can use.

    `cap_bytes`, if given, limits it further, though never below one full context. Raises ConfigError if not even two
    blocks fit.
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


# Unless configured, room for other ranks' prompts is the smaller of MOST_TOKENS tokens and 1 / LEAST_POOL_PART of the
# blocks that there is room for. Prompts of usual length are then divided even if little is left for KV.
MOST_TOKENS, LEAST_POOL_PART = 32768, 10


def blocks_for_others(longest: int, affordable: int, reach: int | None = None) -> int:
    """Blocks, in addition to the pool, for keys of other ranks' prompts, which have `longest` tokens at most.

    affordable: blocks that there is room for in all; reach: engine.parallel.context_parallel_reach.
    """
    if reach is not None:
        return blocks_for(min(longest, reach))
    return min(blocks_for(min(longest, MOST_TOKENS)), affordable // LEAST_POOL_PART)

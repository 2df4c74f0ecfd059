"""Whether a KV pool of a given size fits, and what must fit beside it. Pure."""

from mesh.blocks import blocks_for
from mesh.errors import ConfigError

# Limits of the room for other ranks' prompts, unless it is configured: so many tokens, and one part in so many of the
# blocks that there is room for. Prompts of usual length are then divided even where little is left for KV.
MOST_TOKENS, LEAST_POOL_PART = 32768, 10


def check_room(total_blocks: int, block_bytes: int, there_bytes: int) -> None:
    """Raises ConfigError if a pool of so many blocks takes more than there is."""
    if total_blocks * block_bytes > there_bytes:
        asked, there = (f"{size / 1e9:,.1f} GB" for size in (total_blocks * block_bytes, there_bytes))
        raise ConfigError(
            f"engine.total_blocks={total_blocks} takes {asked} and {there} are free: lower it to"
            f" {there_bytes // block_bytes}, or leave it out"
        )


def blocks_for_others(longest: int, affordable: int, reach: int | None = None) -> int:
    """Blocks beside the pool for the keys of other ranks' prompts, which have `longest` tokens at most.

    affordable: blocks that there is room for in all; reach: engine.parallel.context_parallel_reach.
    """
    if reach is not None:
        return blocks_for(min(longest, reach))
    return min(blocks_for(min(longest, MOST_TOKENS)), affordable // LEAST_POOL_PART)

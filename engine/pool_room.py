"""Whether a KV pool of a given size fits, and what must fit beside it. Pure."""

from mesh.blocks import blocks_for
from mesh.errors import ConfigError

# Unless it is configured, other ranks' prompts have room for so many tokens at most, and for no more than one of so
# many parts of what there is: prompts of usual length are divided even where little is left for KV.
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
    """Blocks beside the pool for the keys of prompts that are other ranks', of `longest` tokens at most.

    affordable: blocks that there is room for in all; reach: engine.parallel.context_parallel_reach.
    """
    if reach is not None:
        return blocks_for(min(longest, reach))
    return min(blocks_for(min(longest, MOST_TOKENS)), affordable // LEAST_POOL_PART)

"""How many KV blocks a further request lacks on a rank, for the scheduler and for the worker. Pure.

The engine admits the head of its queue once the pool has free blocks for all its tokens, and one more for each running
request to grow into (`engine/plan/batcher.py`). A request that lacks blocks is not overtaken.
"""

from mesh.blocks import blocks_for
from mesh.domain.workers import WorkerLoad


def lacking_blocks(
    prompt_tokens: int, held_blocks: int, pending_blocks: float, requests: int, free_blocks: int
) -> float:
    """Blocks that must become free before a rank admits a further request; not above 0 if it does so at once.

    held_blocks: blocks of its prompt that the rank holds. pending_blocks: those that the requests before it take which
    have none yet. requests: all requests before it.
    """
    return blocks_for(prompt_tokens + 1) - held_blocks + pending_blocks + requests - free_blocks


def mean_blocks(load: WorkerLoad, total_blocks: int) -> float:
    """Mean number of blocks that a running request holds, at least one."""
    running = load.running_requests
    return max((total_blocks - load.free_blocks) / running, 1) if running else 1

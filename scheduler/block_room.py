"""Which of a decode worker's requests have KV blocks, and how many must end before one more has them. Pure.

The engine admits the head of its queue once the pool has blocks for all its tokens, and one more for each request that
runs, to grow by (`engine/batcher.py`); nobody overtakes. The worker says how many blocks are free, and how many those
take that wait; a placement says how many it takes (`placed_work`). What a request holds on average follows from both.
"""

from mesh.blocks import BLOCK_TOKENS
from scheduler.candidates import CandidateWorker, blocks


def batch(candidate: CandidateWorker) -> float:
    """How many of its requests have blocks once its next step begins: the others wait, and decode nothing."""
    load, unreported = candidate.load, candidate.unreported
    pending = load.waiting_requests + unreported.requests
    if not pending:
        return load.running_requests
    taken, free = _pending_blocks(candidate), max(load.free_blocks - load.running_requests - pending, 0)
    if taken <= free:
        return load.running_requests + pending
    return max(load.running_requests + pending * free / taken, 1)


def ends_for_blocks(candidate: CandidateWorker, prompt_tokens: int, held_blocks: int, output_tokens: float) -> float:
    """How many of those before it must end until a request has blocks: none, to all of them.

    held_blocks: of its prompt, on the worker. output_tokens: of those that end, on average.
    """
    requests = candidate.requests
    own = blocks(prompt_tokens + 1) - held_blocks
    lacking = own + _pending_blocks(candidate) + requests - candidate.load.free_blocks
    if lacking <= 0:
        return 0
    # Until one ends the others grow, together by as much as it has grown: what it began with is left of its blocks.
    freed = _mean_blocks(candidate) - output_tokens / 2 / BLOCK_TOKENS
    return min(lacking / max(freed, 1), requests)


def _pending_blocks(candidate: CandidateWorker) -> float:
    """Blocks that those take who have none yet."""
    load, placed = candidate.load, candidate.unreported.blocks
    if load.waiting_requests and not load.waiting_blocks:
        return load.waiting_requests * _mean_blocks(candidate) + placed
    return load.waiting_blocks + placed


def _mean_blocks(candidate: CandidateWorker) -> float:
    """Blocks that each of those who run holds, at least one."""
    running = candidate.load.running_requests
    return max((candidate.total_blocks - candidate.load.free_blocks) / running, 1) if running else 1

"""How many of a decode worker's requests have KV blocks, and how many must end before one more gets them. Pure.

`mesh/block_room.py` says when the engine admits a request. The worker reports how many blocks are free, and how many
its waiting requests need; a placement says how many it needs (`placed_work`). How many a running request holds on
average follows from the blocks that are not free.
"""

from mesh.block_room import lacking_blocks, mean_blocks, waiting_blocks
from mesh.blocks import BLOCK_TOKENS
from scheduler.placement.candidates import CandidateWorker


def batch(candidate: CandidateWorker) -> float:
    """How many of the worker's requests have blocks once its next step begins. The others wait and decode nothing."""
    load, unreported = candidate.load, candidate.unreported
    pending = load.waiting_requests + unreported.requests
    if not pending:
        return load.running_requests
    taken, free = _pending_blocks(candidate), max(load.free_blocks - load.running_requests - pending, 0)
    if taken <= free:
        return load.running_requests + pending
    return max(load.running_requests + pending * free / taken, 1)


def ends_for_blocks(candidate: CandidateWorker, prompt_tokens: int, held_blocks: int, output_tokens: float) -> float:
    """How many of the worker's requests must end before a further request gets its blocks: from 0 to all of them.

    held_blocks: blocks of the new request's prompt that the worker holds. output_tokens: mean length of the answers
    that end.
    """
    requests, free_blocks = candidate.requests, candidate.load.free_blocks
    lacking = lacking_blocks(prompt_tokens, held_blocks, _pending_blocks(candidate), requests, free_blocks)
    if lacking <= 0:
        return 0
    # Until one request ends, the others together grow by about as much as it has grown since its start. So on balance
    # its end frees only the blocks that it began with.
    freed = mean_blocks(candidate.load, candidate.total_blocks) - output_tokens / 2 / BLOCK_TOKENS
    return min(lacking / max(freed, 1), requests)


def _pending_blocks(candidate: CandidateWorker) -> float:
    """Blocks for the requests that have none yet: those that wait, and those placed since the last report."""
    return waiting_blocks(candidate.load, candidate.total_blocks) + candidate.unreported.blocks

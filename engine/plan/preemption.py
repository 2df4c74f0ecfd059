"""Which running requests are preempted, so that others can grow or are admitted: pure functions.

A preempted request gives its blocks back and starts again from its tokens. The earliest one is never preempted, and
neither is one whose blocks are promised to another worker.
"""

from collections import Counter
from collections.abc import Sequence

from engine.plan.step_plan import Candidate, Limits, RequestT
from engine.plan.tenants import TenantStanding


def make_room_to_grow(
    decoding: Sequence[RequestT], prompts: Sequence[RequestT], free_blocks: int, references: Sequence[int]
) -> tuple[list[RequestT], int]:
    """Preempt latest arrivals until the others can grow or only the earliest is left.

    Returns the preempted requests, and how many blocks are free then.
    """
    running = sorted([*decoding, *prompts], key=lambda request: request.arrival)
    needed = sum(request.needs_block for request in running)
    dropped: Counter[int] = Counter()
    victims: list[RequestT] = []
    for victim in reversed(running[1:]):
        if needed <= free_blocks:
            break
        if victim.is_pushed:
            continue
        victims.append(victim)
        needed -= victim.needs_block
        dropped.update(victim.progress.block_ids)
        # A block shared with a request that stays is not freed.
        free_blocks += sum(dropped[block] == references[block] for block in victim.progress.block_ids)
    return victims, free_blocks


def giving_way(
    wanted: Candidate[RequestT],
    running: Sequence[RequestT],
    suspended: int,
    free_blocks: int,
    references: Sequence[int],
    limits: Limits,
    standing: TenantStanding,
) -> list[RequestT]:
    """Running requests to preempt so that the head of the queue is admitted; none if that cannot be.

    A tenant gives way only if afterwards it still holds at least as many requests, over its weight, as the other. So
    each tenant reaches its part, and none takes back what it gave. The tenant that holds most gives first, and its
    latest arrival goes first.
    """
    victims: list[RequestT] = []
    share, left = wanted.request.share, sorted(running, key=lambda request: request.arrival)
    held = Counter({request.share.tenant: standing.of(request.share.tenant)[1] for request in left})
    own, dropped, kept = (standing.of(share.tenant)[1] + 1) / share.weight, Counter[int](), set(wanted.cached_blocks)
    while not _fits(wanted, len(left) + suspended, free_blocks, limits):
        yielding = [
            request
            for request in left[1:]
            if not request.is_pushed and (held[request.share.tenant] - 1) / request.share.weight >= own
        ]
        if not yielding:
            return []
        victim = max(yielding, key=lambda each: (held[each.share.tenant] / each.share.weight, each.arrival))
        victims.append(victim)
        left.remove(victim)
        held[victim.share.tenant] -= 1
        dropped.update(victim.progress.block_ids)
        free_blocks += sum(dropped[each] == references[each] and each not in kept for each in victim.progress.block_ids)
    return victims


def _fits(candidate: Candidate[RequestT], running: int, free_blocks: int, limits: Limits) -> bool:
    """Whether it has a slot and blocks, and leaves every running request one block to grow by."""
    return running < limits.max_requests and candidate.free_blocks_taken + running <= free_blocks

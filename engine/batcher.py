"""What the next step computes: a pure function of the requests' progress and the free blocks.

The earliest running request is never preempted and always advances, and nobody overtakes the head of the queue: so
every request that fits the pool alone completes. Blocks that transfers hold can make the earliest one wait, until one
of them ends.

A waiting request whose next block is being computed for another is passed over meanwhile: it finds the block in the
pool once that step is collected.

Among several tenants the one that was served least goes first, with its prompts as with its waiting requests, and a
tenant that holds more than its part gives way to one that holds less: see `giving_way`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from engine.standing import ALONE, Standing
from engine.under_way import BlocksUnderWay, Computed
from mesh.blocks import BLOCK_TOKENS


class Schedulable(Computed, Protocol):
    """What the batcher reads of a request. It plans for the most that rows in flight can bring, and for all drafts."""

    @property
    def arrival(self) -> tuple[int, int]:
        """The arrival batch, and the order within it."""
        ...

    @property
    def draws(self) -> int:
        """While it decodes: how many tokens its next row computes, and yields at most."""
        ...

    @property
    def needs_block(self) -> bool:
        """Whether it decodes and its blocks have no room for its next row. One more block is enough."""
        ...

    @property
    def is_pushed(self) -> bool:
        """Its blocks are promised to another worker: it is never preempted. It draws one token, and never grows."""
        ...


RequestT = TypeVar("RequestT", bound=Schedulable)

# So many waiting requests are passed over in a step at most: each costs a look into the pool.
MOST_PASSED_OVER = 32


@dataclass(frozen=True, slots=True)
class Limits:
    # At least one for each of max_requests and of its drafts, so that every running request fits a step.
    max_step_tokens: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class Candidate(Generic[RequestT]):
    """A waiting request, and what admitting it now would take."""

    request: RequestT
    # Blocks of its prefix found in the pool; at least one token is left to compute.
    cached_blocks: Sequence[int]
    # How many free blocks it would take: new ones for all its tokens and the drafts behind them, and cached ones that
    # nobody holds.
    free_blocks_taken: int
    # It gets its blocks, and takes part in steps only when its KV has come from elsewhere.
    waits: bool = False
    # Tokens of the cached blocks that are computed again.
    computed_again: int = 0
    # Once it is computed, the first block that is not cached could be shared.
    shares_next: bool = False


@dataclass(frozen=True, slots=True)
class Chunk(Generic[RequestT]):
    request: RequestT
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[RequestT]):
    """The engine preempts, then admits (all cached prefixes first), then grows, then computes."""

    preempted: list[RequestT]
    admitted: list[Candidate[RequestT]]
    # Each computes one token, and drafts behind it.
    decoding: list[RequestT]
    # Those of `decoding` that need one more block.
    growing: list[RequestT]
    chunks: list[Chunk[RequestT]]


def plan_step(
    decoding: Sequence[RequestT],
    prompts: Sequence[RequestT],
    waiting: Iterable[Candidate[RequestT]],
    free_blocks: int,
    references: Sequence[int],
    limits: Limits,
    suspended: int = 0,
    standing: Standing = ALONE,
) -> StepPlan[RequestT]:
    """Decide one step: a row for every decoding request, then chunks of prompts, earliest and shortest first.

    Requests in `decoding` have one token left to compute; those in `prompts` have more, and hold blocks for all their
    tokens; `suspended` more requests hold theirs, and wait for KV from elsewhere.
    `waiting` is in order of admission and may be lazy: it is read one request further than requests are admitted.
    `references[block]` says how many requests hold a block.
    """
    growing = [request for request in decoding if request.needs_block]
    preempted: list[RequestT] = []
    if len(growing) > free_blocks:
        preempted, free_blocks = _preempt(decoding, prompts, free_blocks, references)
        gone = {request.arrival for request in preempted}
        decoding = [request for request in decoding if request.arrival not in gone]
        prompts = [request for request in prompts if request.arrival not in gone]
        growing = [request for request in growing if request.arrival not in gone]
        # This happens only if transfers hold the blocks that are missing.
        stalled = {request.arrival for request in growing[free_blocks:]}
        decoding = [request for request in decoding if request.arrival not in stalled]
        growing = growing[:free_blocks]
    free_blocks -= len(growing)
    budget = limits.max_step_tokens - sum(request.draws for request in decoding)
    admitted: list[Candidate[RequestT]] = []
    # What preemption freed is for those who still run; a waiting request would take it at once and be preempted again.
    if not preempted:
        running = len(decoding) + len(prompts) + suspended
        head: list[Candidate[RequestT]] = []
        under_way = BlocksUnderWay(decoding, prompts, standing)
        if standing is not ALONE:
            head = list(islice(waiting := iter(waiting), 1))
        # Whoever waits for blocks that another one computes needs no place yet.
        if head and not _awaits_blocks(head[0], under_way):
            preempted = giving_way(head[0], [*decoding, *prompts], suspended, free_blocks, references, limits, standing)
        if preempted:
            # The others find their way into what is left of the freed blocks in the next step.
            admitted = head
            decoding, prompts, growing = (_without(preempted, each) for each in (decoding, prompts, growing))
            budget = limits.max_step_tokens - sum(request.draws for request in decoding)
        else:
            places, left = limits.max_requests - running, _Budget(prompts, budget, standing)
            admitted = _admit(chain(head, waiting), running, places, free_blocks, left, under_way)
    chunks = _chunks(prompts, admitted, budget, standing)
    return StepPlan(preempted, admitted, list(decoding), growing, chunks)


def giving_way(
    wanted: Candidate[RequestT],
    running: Sequence[RequestT],
    suspended: int,
    free_blocks: int,
    references: Sequence[int],
    limits: Limits,
    standing: Standing,
) -> list[RequestT]:
    """Running requests to preempt so that the head of the queue is admitted; none if that cannot be.

    A tenant gives way to another that has fewer requests, over their weights, even once it has given: so each comes to
    its part, and nobody takes back what it gave. Of the tenant that holds most the latest arrival goes first.
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


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _fits(candidate: Candidate[RequestT], running: int, free_blocks: int, limits: Limits) -> bool:
    """Whether it has a slot and blocks, and leaves every running request one block to grow by."""
    return running < limits.max_requests and candidate.free_blocks_taken + running <= free_blocks


def _without(gone: Iterable[RequestT], requests: Iterable[RequestT]) -> list[RequestT]:
    arrivals = {request.arrival for request in gone}
    return [request for request in requests if request.arrival not in arrivals]


def _order(request: Schedulable) -> tuple[int, int, int, int]:
    batch, position = request.arrival
    return request.share.priority, batch, request.progress.left, position


def _preempt(
    decoding: Sequence[RequestT], prompts: Sequence[RequestT], free_blocks: int, references: Sequence[int]
) -> tuple[list[RequestT], int]:
    """Latest arrivals first, until the others can grow or only the earliest is left. Returns them, and what is free."""
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


def _level(request: Schedulable, standing: Standing) -> tuple[float, int]:
    """What its tenant has had, and holds: less goes first."""
    return standing.of(request.share.tenant)


def _chunks(
    prompts: Sequence[RequestT], admitted: Iterable[Candidate[RequestT]], budget: int, standing: Standing
) -> list[Chunk[RequestT]]:
    """Prompts by their tenants, running ones before admitted ones; admitted ones in their order.

    Tokens that are computed again are computed in one step: drafts are only right behind them, and their blocks may be
    others' too. Every step has room for that many (`Limits`), so the first prompt always goes on.
    """
    work = [
        (_level(each, standing), each, each.progress.left, each.progress.known - each.progress.computed_at_most)
        for each in sorted(prompts, key=_order)
    ]
    level = (0.0, 0)
    for candidate in admitted:
        level = max(level, _level(candidate.request, standing))
        work.append((level, candidate.request, _step_tokens(candidate), candidate.computed_again))
    if standing is not ALONE:
        work.sort(key=lambda each: each[0])
    chunks = []
    for _, request, left, again in work:
        tokens = min(budget, left)
        if tokens and tokens >= again:
            chunks.append(Chunk(request, tokens))
            budget -= tokens
    return chunks


class _Budget:
    """Tokens that a step has for waiting requests, as they are admitted in order."""

    def __init__(self, prompts: Iterable[Schedulable], tokens: int, standing: Standing) -> None:
        self._left = tokens
        self._standing = standing
        # Running prompts that go before any request not asked about yet.
        self._prompts = sorted(((_level(each, standing), each.progress.left) for each in prompts), reverse=True)

    def left(self, request: Schedulable) -> int:
        """What those that go before this request leave it."""
        while self._prompts and self._prompts[-1][0] <= _level(request, self._standing):
            self._left -= self._prompts.pop()[1]
        return self._left

    def take(self, tokens: int) -> None:
        self._left -= tokens


def _admit(
    waiting: Iterable[Candidate[RequestT]],
    running: int,
    places: int,
    free_blocks: int,
    budget: _Budget,
    under_way: BlocksUnderWay,
) -> list[Candidate[RequestT]]:
    """Take from the queue's head while slots, blocks and tokens last.

    Leaves every running request one block to grow by, or the newest would be preempted right away.
    """
    admitted: list[Candidate[RequestT]] = []
    passed_over = 0
    for candidate in waiting if places > 0 else ():
        tokens = _step_tokens(candidate)
        if (tokens and budget.left(candidate.request) <= 0) or passed_over == MOST_PASSED_OVER:
            break
        if _awaits_blocks(candidate, under_way):
            passed_over += 1
            continue
        if candidate.free_blocks_taken + running > free_blocks:
            break
        admitted.append(candidate)
        if tokens:
            under_way.admit(candidate.request)
        running += 1
        free_blocks -= candidate.free_blocks_taken
        budget.take(tokens)
        if len(admitted) == places:
            break
    return admitted


def _awaits_blocks(candidate: Candidate[RequestT], under_way: BlocksUnderWay) -> bool:
    return candidate.shares_next and under_way.has(candidate.request, len(candidate.cached_blocks))


def _step_tokens(candidate: Candidate[RequestT]) -> int:
    """What is left to compute, if it takes part in the step."""
    if candidate.waits:
        return 0
    cached = len(candidate.cached_blocks) * BLOCK_TOKENS
    return candidate.request.progress.left - cached + candidate.computed_again

"""What the next step computes: a pure function of the requests' progress and the free blocks.

The earliest running request is never preempted and always advances, and no request overtakes the head of the queue: so
every request that fits the pool alone completes. Blocks that transfers hold can make the earliest one wait, until one
of them ends.

A waiting request whose next block is being computed for another, or read from host memory, is passed over meanwhile:
it finds the block in the pool once that step is collected, or that read has ended.

Among several tenants the one that was served least goes first, with its prompts as with its waiting requests, and a
tenant that holds more than its part gives way to one that holds less: see `engine/plan/preemption.py`.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Generic, NamedTuple

from engine.blocks.under_way import BlocksUnderWay
from engine.plan.preemption import giving_way, make_room_to_grow
from engine.plan.step_plan import UNLIMITED, Candidate, Chunk, Limits, PromptLimits, RequestT, Schedulable, StepPlan
from engine.plan.tenants import ALONE, TenantStanding

# At most this many waiting requests are passed over in a step: each costs a look into the pool.
MOST_PASSED_OVER = 32


def plan_step(
    *,
    decoding: Sequence[RequestT],
    prompts: Sequence[RequestT],
    waiting: Iterable[Candidate[RequestT]],
    free_blocks: int,
    references: Sequence[int],
    limits: Limits,
    suspended: int = 0,
    prompt_limits: PromptLimits = UNLIMITED,
    standing: TenantStanding = ALONE,
    arriving: Collection[bytes] = (),
) -> StepPlan[RequestT]:
    """Decide one step: a row for every decoding request, then chunks of prompts, earliest and shortest first.

    Requests in `decoding` have one token left to compute; those in `prompts` have more, and hold blocks for all their
    tokens; `suspended` more requests hold theirs, and wait for KV from elsewhere.
    `waiting` is in order of admission and may be lazy: it is read one request further than requests are admitted.
    `references[block]` says how many requests hold a block. `arriving`: contents that are being read into the pool.
    """
    decoding, prompts, growing, preempted, free_blocks = _grow(decoding, prompts, free_blocks, references)
    budget = _prompt_budget(decoding, limits, prompt_limits)
    bounds = prompt_limits if decoding or prompt_limits.decodes else UNLIMITED
    admitted: list[Candidate[RequestT]] = []
    # Blocks that preemption freed are for running requests; a waiting one would take them and be preempted again.
    if not preempted:
        running = len(decoding) + len(prompts) + suspended
        head: list[Candidate[RequestT]] = []
        under_way = BlocksUnderWay(decoding, prompts, standing, arriving)
        if standing is not ALONE:
            head = list(islice(waiting := iter(waiting), 1))
        # A request that waits for blocks which another one computes needs no place yet.
        if head and not _awaits_blocks(head[0], under_way):
            preempted = giving_way(head[0], [*decoding, *prompts], suspended, free_blocks, references, limits, standing)
        if preempted:
            # The other waiting requests can take what is left of the freed blocks in the next step.
            admitted = head
            decoding, prompts, growing = (_without(preempted, each) for each in (decoding, prompts, growing))
            budget = _prompt_budget(decoding, limits, prompt_limits)
        else:
            places, left = limits.max_requests - running, _Budget(prompts, budget, standing)
            admitted = _admit(chain(head, waiting), running, places, free_blocks, left, under_way)
    chunks = _chunks(prompts, admitted, budget, bounds, standing)
    return StepPlan(preempted, admitted, list(decoding), growing, chunks)


class _Growth(NamedTuple, Generic[RequestT]):
    """What running requests do in the step, once each that decodes has the block that it needs."""

    decoding: Sequence[RequestT]
    prompts: Sequence[RequestT]
    # Those of `decoding` that need one more block.
    growing: list[RequestT]
    # They gave back their blocks.
    preempted: list[RequestT]
    # How many blocks are left.
    free_blocks: int


def _grow(
    decoding: Sequence[RequestT], prompts: Sequence[RequestT], free_blocks: int, references: Sequence[int]
) -> _Growth[RequestT]:
    growing = [request for request in decoding if request.needs_block]
    if len(growing) <= free_blocks:
        return _Growth(decoding, prompts, growing, [], free_blocks - len(growing))
    preempted, free_blocks = make_room_to_grow(decoding, prompts, free_blocks, references)
    decoding, prompts, growing = (_without(preempted, each) for each in (decoding, prompts, growing))
    # Blocks are still missing only if transfers hold them. Those that lack one stay out of this step.
    decoding, growing = _without(growing[free_blocks:], decoding), growing[:free_blocks]
    return _Growth(decoding, prompts, growing, preempted, free_blocks - len(growing))


def _prompt_budget(decoding: Sequence[Schedulable], limits: Limits, prompt_limits: PromptLimits) -> int:
    left, most_tokens = limits.max_step_tokens - sum(request.draws for request in decoding), prompt_limits.most_tokens
    return left if most_tokens is None or not (decoding or prompt_limits.decodes) else min(left, most_tokens)


def _without(gone: Iterable[RequestT], requests: Iterable[RequestT]) -> list[RequestT]:
    arrivals = {request.arrival for request in gone}
    return [request for request in requests if request.arrival not in arrivals]


def _order(request: Schedulable) -> tuple[int, int, int, int]:
    batch, position = request.arrival
    return request.share.priority, batch, request.progress.left, position


def _level(request: Schedulable, standing: TenantStanding) -> tuple[float, int]:
    """What the request's tenant has had, and what it holds. Lower goes first."""
    return standing.of(request.share.tenant)


def _chunks(
    prompts: Sequence[RequestT],
    admitted: Iterable[Candidate[RequestT]],
    budget: int,
    bounds: PromptLimits,
    standing: TenantStanding,
) -> list[Chunk[RequestT]]:
    """Chunks of prompts in the order of their tenants: running prompts before admitted ones, these in their order.

    budget: the most tokens of all chunks. bounds: those that count in addition.

    Tokens that are computed again must fit one step: only the drafts after all of them are right, and other requests
    may share their blocks. Every step has room for that many (`Limits`), so the first prompt always goes on.
    """
    work = [
        (_level(each, standing), each, each.progress.left, each.progress.known - each.progress.computed_at_most)
        for each in sorted(prompts, key=_order)
    ]
    level = (0.0, 0)
    for candidate in admitted:
        level = max(level, _level(candidate.request, standing))
        work.append((level, candidate.request, candidate.step_tokens, candidate.computed_again))
    if standing is not ALONE:
        work.sort(key=lambda each: each[0])
    chunks, turn = [], bounds.turn
    divided, alone = bounds.divided_tokens, budget if bounds.most_alone is None else bounds.most_alone
    for _, request, left, again in work:
        tokens = min(budget, left)
        if divided is not None and tokens >= divided:
            tokens = _equal_part(left, tokens, max(divided, again))
        is_long = bounds.long_tokens is not None and request.progress.computed_at_most + left >= bounds.long_tokens
        if is_long and not turn:
            tokens = 0
        elif divided is None or tokens < divided:
            tokens = min(tokens, alone)
        if tokens and tokens >= again:
            chunks.append(Chunk(request, tokens))
            # A second such chunk would be computed here alone, in several times the time that all ranks take for it.
            turn = turn and not (is_long and divided is not None and tokens >= divided)
            budget -= tokens
            alone = max(alone - tokens, 0)
    return chunks


def _equal_part(tokens: int, most: int, fewest: int) -> int:
    """How many tokens the first of a prompt's chunks has if they are equal and as few as can be; `most` if that would
    be below `fewest`. Ranks divide no chunk below it, so such a rest would take one of them a step as long as others.
    """
    part = -(-tokens // -(-tokens // most))
    return part if part >= fewest else most


class _Budget:
    """The step's tokens that are left for waiting requests, which are admitted in order."""

    def __init__(self, prompts: Iterable[Schedulable], tokens: int, standing: TenantStanding) -> None:
        self._left = tokens
        self._standing = standing
        # Running prompts that `left` has not deducted yet; the last entry is deducted first.
        self._prompts = sorted(((_level(each, standing), each.progress.left) for each in prompts), reverse=True)

    def left(self, request: Schedulable) -> int:
        """How many tokens are left for this request by all that go before it."""
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

    Leaves every running request one block to grow by; otherwise the newest would be preempted right away.
    """
    admitted: list[Candidate[RequestT]] = []
    passed_over = 0
    for candidate in waiting if places > 0 else ():
        tokens = candidate.step_tokens
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
        under_way.read(candidate.hosted)
        running += 1
        free_blocks -= candidate.free_blocks_taken
        budget.take(tokens)
        if len(admitted) == places:
            break
    return admitted


def _awaits_blocks(candidate: Candidate[RequestT], under_way: BlocksUnderWay) -> bool:
    return candidate.shares_next and under_way.has(candidate.request, len(candidate.cached_blocks))

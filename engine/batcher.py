"""What the next step computes: a pure function of the requests' progress and the free blocks.

The earliest running request is never preempted and always advances, and nobody overtakes the head of the queue: so
every request that fits the pool alone completes. Blocks that transfers hold can make the earliest one wait, until one
of them ends.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from engine.progress import Progress
from mesh.blocks import BLOCK_TOKENS


class Schedulable(Protocol):
    """What the batcher reads of a request. It plans for the most that rows in flight can bring, and for all drafts."""

    @property
    def arrival(self) -> tuple[int, int]:
        """The arrival batch, and the order within it."""
        ...

    @property
    def progress(self) -> Progress: ...

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
    chunks = _chunks(sorted(prompts, key=_order), budget)
    budget -= sum(chunk.tokens for chunk in chunks)
    admitted: list[Candidate[RequestT]] = []
    # What preemption freed is for those who still run; a waiting request would take it at once and be preempted again.
    if not preempted:
        running = len(decoding) + len(prompts) + suspended
        admitted = _admit(islice(waiting, limits.max_requests - running), running, free_blocks, budget)
        chunks += _admitted_chunks(admitted, budget)
    return StepPlan(preempted, admitted, list(decoding), growing, chunks)


def must_preempt(decoding: Sequence[Schedulable], free_blocks: int) -> bool:
    """Whether `plan_step` would take blocks from one request for another."""
    # Mostly there is a block for each of them.
    return len(decoding) > free_blocks and sum(request.needs_block for request in decoding) > free_blocks


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _order(request: Schedulable) -> tuple[int, int, int]:
    batch, position = request.arrival
    return batch, request.progress.left, position


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


def _chunks(prompts: Sequence[RequestT], budget: int) -> list[Chunk[RequestT]]:
    chunks = []
    for request in prompts:
        tokens = min(budget, request.progress.left)
        if not tokens:
            break
        chunks.append(Chunk(request, tokens))
        budget -= tokens
    return chunks


def _admit(
    waiting: Iterable[Candidate[RequestT]], running: int, free_blocks: int, budget: int
) -> list[Candidate[RequestT]]:
    """Take from the queue's head while slots, blocks and tokens last.

    Leaves every running request one block to grow by, or the newest would be preempted right away.
    """
    admitted = []
    for candidate in waiting:
        tokens = _step_tokens(candidate)
        if (tokens and budget <= 0) or candidate.free_blocks_taken + running > free_blocks:
            break
        admitted.append(candidate)
        running += 1
        free_blocks -= candidate.free_blocks_taken
        budget -= tokens
    return admitted


def _admitted_chunks(admitted: Iterable[Candidate[RequestT]], budget: int) -> list[Chunk[RequestT]]:
    chunks = []
    for candidate in admitted:
        tokens = min(budget, _step_tokens(candidate))
        if tokens:
            chunks.append(Chunk(candidate.request, tokens))
        budget -= tokens
    return chunks


def _step_tokens(candidate: Candidate[RequestT]) -> int:
    """What is left to compute, if it takes part in the step."""
    if candidate.waits:
        return 0
    cached = len(candidate.cached_blocks) * BLOCK_TOKENS
    return candidate.request.progress.left - cached + candidate.computed_again

"""Plans of single steps, and the requests from which they are made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from hypothesis import strategies as st

from engine.plan.batcher import plan_step
from engine.plan.step_plan import Candidate, Limits, PromptLimits, StepPlan
from engine.plan.tenants import ALONE, TenantStanding
from engine.requests.progress import Progress
from mesh.blocks import blocks_for
from mesh.domain.shares import ONE_TENANT, Share

# Requests that decode, prompts, candidates, and how many blocks are free.
Situation: TypeAlias = "tuple[list[Request], list[Request], list[Candidate[Request]], int]"
LIMITS = Limits(max_step_tokens=256, max_requests=8)


@dataclass(eq=False)
class Request:
    arrival: tuple[int, int]
    progress: Progress
    is_pushed: bool = False
    share: Share = ONE_TENANT
    # Tokens of its next row, and the most drafts after it.
    draws: int = 1
    most_drafts: int = 0
    # Hashes of its full blocks.
    contents: Sequence[bytes] = ()

    def content(self, index: int) -> bytes | None:
        return self.contents[index] if index < len(self.contents) else None

    @property
    def needs_block(self) -> bool:
        progress = self.progress
        row = self.draws + self.most_drafts if progress.left == 1 else 0
        return progress.computed_at_most + row > progress.covered


def request_of(arrival: tuple[int, int], tokens: int, computed: int = 0, block_ids: Sequence[int] = ()) -> Request:
    progress = Progress([0] * tokens)
    progress.grown(block_ids)
    progress.landed(computed)
    return Request(arrival, progress)


def running(arrival: int, tokens: int, computed: int, block_ids: Sequence[int]) -> Request:
    return request_of((arrival, 0), tokens, computed, block_ids)


def candidate(arrival: int, tokens: int, cached_blocks: int = 0) -> Candidate[Request]:
    new = blocks_for(tokens) - cached_blocks
    return Candidate(request_of((arrival, 0), tokens), range(cached_blocks), new)


def plan(
    decoding: Sequence[Request] = (),
    prompts: Sequence[Request] = (),
    waiting: Iterable[Candidate[Request]] = (),
    free_blocks: int = 100,
    limits: Limits = LIMITS,
    suspended: int = 0,
    standing: TenantStanding = ALONE,
    most_prompt_tokens: int | None = None,
    prompt_limits: PromptLimits | None = None,
) -> StepPlan[Request]:
    """prompt_limits: by default only `most_prompt_tokens`."""
    held = [block for request in (*decoding, *prompts) for block in request.progress.block_ids]
    references = [held.count(block) for block in range(max(held, default=0) + 1)]
    return plan_step(
        decoding=decoding,
        prompts=prompts,
        waiting=waiting,
        free_blocks=free_blocks,
        references=references,
        limits=limits,
        suspended=suspended,
        prompt_limits=prompt_limits or PromptLimits(most_tokens=most_prompt_tokens),
        standing=standing,
    )


def chunks_of(step: StepPlan[Request]) -> list[tuple[int, int]]:
    return [(chunk.request.arrival[0], chunk.tokens) for chunk in step.chunks]


def alike(candidate: Candidate[Request], contents: Sequence[bytes]) -> Candidate[Request]:
    """The candidate with a prompt of these blocks, whose first uncached block it could share with others."""
    candidate.request.contents = contents
    return replace(candidate, shares_next=True)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    decoding, prompts, next_block = [], [], 0
    for arrival in draw(st.permutations(range(draw(st.integers(0, 8))))):
        tokens = draw(st.integers(2, 400))
        if draw(st.booleans()):
            blocks = blocks_for(tokens - 1)
            decoding.append(running(arrival, tokens, tokens - 1, range(next_block, next_block + blocks)))
        else:
            blocks = blocks_for(tokens)
            computed = draw(st.integers(0, tokens - 2))
            prompts.append(running(arrival, tokens, computed, range(next_block, next_block + blocks)))
        next_block += blocks
    waiting = [candidate(arrival, draw(st.integers(1, 500))) for arrival in range(10, draw(st.integers(10, 14)))]
    # A request that is alone always fits, because the engine refuses requests that would not.
    free = draw(st.integers(0 if len(decoding) + len(prompts) > 1 else 8, 12))
    return decoding, prompts, waiting, free

"""A step's plan as plain data: what the batcher reads of requests, and what it decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.blocks.under_way import Computed
from mesh.blocks import BLOCK_TOKENS


class Schedulable(Computed, Protocol):
    """What the batcher reads of a request. The batcher plans for the most that rows in flight can bring, all drafts
    included.
    """

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
        """Whether its blocks are promised to another worker. If so, it is never preempted, draws one token, and never
        grows.
        """
        ...


RequestT = TypeVar("RequestT", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class Limits:
    # At least one token for each of max_requests and for each of its drafts, so that every running request fits a step.
    max_step_tokens: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """How much of prompts a step computes: see `engine.pace.pacing`."""

    # If false, the first prompt that is to be computed here stays in the queue, and so do all requests after it. That
    # does not hold for a prompt of which few tokens are left after cached blocks, nor for one that all ranks compute
    # together.
    begin: bool = True
    # The fewest tokens of a chunk that all ranks compute together; None if they never do.
    divided_tokens: int | None = None
    # The most prompt tokens of the step if any request decodes; None if only `Limits` bounds them.
    most_tokens: int | None = None
    # The most prompt tokens of the step, if any request decodes, that this rank computes alone, since they are no chunk
    # that is divided; None if `most_tokens` bounds them.
    most_alone: int | None = None
    # If any request decodes, a step takes one chunk that is divided of prompts of at least this many tokens, and none
    # of them without a `turn`; None if such prompts are taken like others.
    long_tokens: int | None = None
    turn: bool = True
    # Whether requests decode on some rank. If all requests here stall and none decodes elsewhere, `most_tokens` does
    # not count: prompts then hold up no request, and may hold the blocks that are missing.
    decodes: bool = False


@dataclass(frozen=True, slots=True)
class PromptsLeft:
    """What a step leaves of the prompts that a rank is to compute."""

    # Whether prompts wait in the queue, and the most tokens that those which are next have to compute.
    wait: bool
    longest_next: int
    # The length of the longest prompt that has begun; 0 if none is left.
    longest_begun: int


@dataclass(frozen=True, slots=True)
class PromptsAhead:
    """The prompts that have room on a rank: those that run, and those of the queue that could be admitted now."""

    # Tokens left to compute, and of how many prompts.
    tokens: int
    prompts: int


# Prompts take all that requests that decode leave.
UNLIMITED = PromptLimits()


@dataclass(frozen=True, slots=True)
class Candidate(Generic[RequestT]):
    """A waiting request, and what admitting it now would take."""

    request: RequestT
    # Blocks of its prefix found in the pool; at least one token is left to compute.
    cached_blocks: Sequence[int]
    # How many free blocks it would take: new ones for all its tokens and the drafts after them, and cached ones that
    # are free.
    free_blocks_taken: int
    # Whether it only gets its blocks now, and takes part in steps once its KV has come from elsewhere.
    waits: bool = False
    # How many tokens of the cached blocks are computed again.
    computed_again: int = 0
    # Whether the first block that is not cached could be shared once it is computed or read.
    shares_next: bool = False
    # Contents after the cached blocks that are read from host memory first.
    hosted: Sequence[bytes] = ()

    @property
    def step_tokens(self) -> int:
        """How many tokens are left to compute; 0 if it does not take part in the step yet."""
        if self.waits:
            return 0
        return self.request.progress.left - len(self.cached_blocks) * BLOCK_TOKENS + self.computed_again


@dataclass(frozen=True, slots=True)
class Chunk(Generic[RequestT]):
    request: RequestT
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[RequestT]):
    """The engine preempts, then admits (all cached prefixes first), then grows, then computes."""

    preempted: list[RequestT]
    admitted: list[Candidate[RequestT]]
    # Each computes one token, and drafts after it.
    decoding: list[RequestT]
    # Those of `decoding` that need one more block.
    growing: list[RequestT]
    chunks: list[Chunk[RequestT]]

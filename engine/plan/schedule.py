"""Who waits, who takes part in steps, and who holds which blocks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import takewhile

from engine.blocks.block_tables import BlockTables
from engine.blocks.host_blocks import HostBlocks
from engine.blocks.kv_pool import BlockPool
from engine.plan.batcher import plan_step
from engine.plan.queues import Running, WaitingQueue
from engine.plan.step_plan import Candidate, Limits, PromptLimits, PromptsAhead, PromptsLeft, StepPlan
from engine.plan.tenants import Tenants, TenantStanding
from engine.requests.request import Request
from engine.step.step_work import StepWork
from mesh.blocks import BLOCK_TOKENS
from mesh.tails import is_tail

# One token of an answer counts as this many of a prompt: about the ratio of their GPU time, and of providers' prices.
OUTPUT_WEIGHT = 4


class RequestSchedule:
    """The queues and block tables of all requests, and the plans made of them.

    A request is queued, then admitted with its blocks, then runs: at once, or when its KV has come from elsewhere.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        prefix_cache: bool,
        would_wait: Callable[[Request, int], bool],
        host: HostBlocks | None = None,
    ) -> None:
        """would_wait: whether a request that finds that many of its blocks in this rank's memory waits for KV from
        elsewhere; host: blocks in host memory, None if none are kept there.
        """
        self._pool = pool
        self._limits = limits
        self._would_wait = would_wait
        self._block_tables = BlockTables(pool, prefix_cache, host)
        self._waiting = WaitingQueue()
        self._running = Running()
        self._tenants = Tenants()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_blocks(self) -> int:
        """Free blocks that admitting all those who wait takes, as far as known."""
        return self._waiting.blocks

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens left to compute here, as far as known."""
        return self._waiting.tokens + self._running.prompt_tokens

    @property
    def queued_sparse_tokens(self) -> int:
        """How many of the `queued_prefill_tokens` will be attended to sparsely."""
        return self._waiting.sparse_tokens + self._running.sparse_tokens

    def enqueue(self, request: Request) -> None:
        self._tenants.enter(request.key, request.share)
        cached = self._block_tables.match(request)
        found = len(cached) + len(self._block_tables.match_host(request, cached))
        uncached_tokens = len(request.progress.token_ids) - found * BLOCK_TOKENS
        blocks = self._block_tables.lacking(request, cached) + self._pool.free_among(cached)
        self._waiting.add(request, 0 if request.remote_prefill else uncached_tokens, blocks)

    def run(self, request: Request) -> None:
        """Compute an admitted request from the next step on. The KV that it has so far is in its blocks."""
        self._running.add(request)

    def withdraw(self, request: Request) -> None:
        """Let no further step take the request on. It keeps its blocks."""
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)

    def prompts_left(self, work: StepWork) -> PromptsLeft:
        """What this work, which is not launched yet, leaves."""
        taken = {chunk.request.key: chunk.tokens for chunk in work.chunks}
        begun, longest_next = 0, self._waiting.longest_next
        for request in self._running.prompts:
            progress = request.progress
            if progress.left > taken.get(request.key, 0):
                if progress.begun or request.key in taken:
                    begun = max(begun, progress.tokens_at_most)
                else:
                    # It was admitted, and another rank's prompt goes first.
                    longest_next = max(longest_next, progress.tokens_at_most)
        return PromptsLeft(self._waiting.tokens > 0, longest_next, begun)

    def prompts_ahead(self, suspended: int) -> PromptsAhead:
        """suspended: as for `plan`. Requests that wait count as equal, with the mean of their tokens and blocks."""
        running, waiting, lacking = self._running, len(self._waiting), self._waiting.blocks
        places = self._limits.max_requests - suspended - len(running.decoding) - len(running.prompts)
        fit = max(min(waiting, places), 0)
        if lacking > self._pool.free_blocks:
            fit = min(fit, waiting * self._pool.free_blocks // lacking)
        tokens = self._waiting.tokens * fit // waiting if fit else 0
        return PromptsAhead(running.prompt_tokens + tokens, len(running.prompts) + fit)

    def plan(self, suspended: int, prompt_limits: PromptLimits, arriving: Collection[bytes] = ()) -> StepPlan[Request]:
        """The next step. Nothing changes before `carry_out`.

        suspended: how many requests are admitted and wait for KV from elsewhere. They take part once `run` is called.
        arriving: contents that are being read into the pool.
        """
        # If rows in flight may bring a request's last token, its `draws` is 0. It decodes on if they did not bring it.
        decoding = [request for request in self._running.decoding if request.draws]
        return plan_step(
            decoding=decoding,
            prompts=self._running.prompts,
            waiting=self._candidates(self._tenants.standing, prompt_limits),
            free_blocks=self._pool.free_blocks,
            references=self._pool.references,
            limits=self._limits,
            suspended=suspended + len(self._running.decoding) - len(decoding),
            prompt_limits=prompt_limits,
            standing=self._tenants.standing,
            arriving=arriving,
        )

    def carry_out(self, plan: StepPlan[Request]) -> None:
        """Bring blocks and queues to where the rows of a plan, made just now, can be computed."""
        for request in plan.preempted:
            self._preempt(request)
        # Prefixes are held before anything is allocated, since that might evict them.
        for candidate in plan.admitted:
            self._block_tables.hold(candidate.cached_blocks, candidate.hosted)
        self._block_tables.grow(plan.growing)
        for candidate in plan.admitted:
            self._waiting.remove(candidate.request)
            self._tenants.admit(candidate.request.key)
            self._block_tables.fill(candidate.request, candidate.cached_blocks, candidate.hosted)

    @property
    def decoding(self) -> Sequence[Request]:
        """The requests that compute a token in each step."""
        return self._running.decoding

    def count(self, work: StepWork, steps: int = 1) -> None:
        """Count this work as done for its tenants, in each of `steps` steps."""
        for _ in range(steps if self._tenants.several else 0):
            self._tenants.serve((request.key, OUTPUT_WEIGHT * request.draws) for request in work.decoding)
            self._tenants.serve((chunk.request.key, chunk.tokens) for chunk in work.chunks)

    def launched(self, work: StepWork) -> None:
        """Rows of this work are in flight: some requests begin to decode, and some end with their row."""
        self.count(work)
        if work.chunks or any(request.progress.tokens_at_least >= request.limit for request in work.decoding):
            self._running.sort()

    def register(self, request: Request) -> None:
        """Make the request's full blocks known to others."""
        self._block_tables.register(request)

    def release(self, request: Request) -> None:
        """Take back the blocks of a request that ended."""
        self._block_tables.release(request)
        self._tenants.leave(request.key)

    def _candidates(self, standing: TenantStanding, prompt_limits: PromptLimits) -> Iterator[Candidate[Request]]:
        candidates = self._all_candidates(standing)
        if prompt_limits.begin:
            return candidates
        return takewhile(partial(self._begins_at_once, prompt_limits.divided_tokens), candidates)

    def _begins_at_once(self, divided_tokens: int | None, candidate: Candidate[Request]) -> bool:
        """Whether it need not wait for prompts of other ranks: it holds those ranks up briefly or not at all."""
        tokens = candidate.step_tokens
        divided = divided_tokens is not None and min(tokens, self._limits.max_step_tokens) >= divided_tokens
        return candidate.waits or divided or is_tail(tokens, len(candidate.cached_blocks))

    def _all_candidates(self, standing: TenantStanding) -> Iterator[Candidate[Request]]:
        for request in self._waiting.in_order(standing):
            cached = self._block_tables.match(request)
            hosted = self._block_tables.match_host(request, cached)
            free_taken = self._block_tables.lacking(request, cached) + self._pool.free_among(cached)
            waits = self._would_wait(request, len(cached) + len(hosted))
            again = request.progress.rewind if cached else 0
            shares_next = not waits and self._block_tables.could_share(request, cached)
            yield Candidate(request, cached, free_taken, waits or bool(hosted), again, shares_next, hosted)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._block_tables.release(request)
        self._tenants.give_back(request.key)
        self.enqueue(request)

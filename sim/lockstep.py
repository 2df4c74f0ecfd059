"""The DP ranks of one worker, whose steps begin and end together."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

import msgspec

from engine.parallel.config import ParallelConfig
from engine.plan.step_plan import Chunk
from engine.protocol.messages import StepResult, Submit
from engine.requests.request import Request
from engine.runner.spread import Offer, chosen
from engine.step.agreement import agreed, packed
from engine.step.step_work import StepWork
from mesh.domain.workers import RankStatus
from mesh.rank_choice import choose_rank
from sim.network import Link
from sim.rank import SimulatedRank, ToRank
from sim.timeline import Timeline
from worker.chains import found_blocks
from worker.merging import merge_loads, merge_transfers
from worker.ranks.view import RankView


class Lockstep:
    """Stands in for a worker's single `SimulatedRank`. A request goes to the rank that the product would choose.

    All ranks take a turn together: they read their messages, all step if any has work, and all give their results. The
    step takes as long as its slowest rank needs, because ranks wait for one another in every layer with experts.
    """

    def __init__(
        self, timeline: Timeline, on_result: Callable[[StepResult, int], None], parallel: ParallelConfig
    ) -> None:
        """on_result: called with a rank's result, in which the load is that of all ranks, and with that rank's number.
        parallel: says which chunks of prompts all ranks compute together.
        """
        self.alive = True
        self.frozen_until = 0.0
        self._timeline = timeline
        self._on_result = on_result
        self._parallel = parallel
        self._ranks: list[SimulatedRank] = []
        self._views: list[RankView] = []
        # The rank of each request, by the request's key.
        self._rank_of: dict[int, int] = {}
        self._busy = False

    def add(self, rank: SimulatedRank) -> None:
        self._ranks.append(rank)
        self._views.append(RankView(rank.ready))

    @property
    def statuses(self) -> Sequence[RankStatus]:
        return [view.status for view in self._views]

    def submit(self, submit: Submit, booked: int | None) -> None:
        """booked: see `choose_rank`."""
        number = self._rank_of[submit.key] = self._choose(submit, booked)
        self._views[number].submitted(submit)
        self._ranks[number].send(submit)

    def send(self, message: ToRank) -> None:
        if message.key in self._rank_of:
            self._ranks[self._rank_of[message.key]].send(message)
        else:
            # The request has ended, but its KV may still be pushed. Ranks that do not know it ignore the message.
            for rank in self._ranks:
                rank.send(message)

    def wake(self) -> None:
        if not self._busy:
            self._busy = True
            self._timeline.at(max(self._timeline.now, self.frozen_until), self._turn)

    def observe(self, number: int, result: StepResult) -> None:
        """A rank's step has ended."""
        self._views[number].observe(result)
        for output in result.outputs:
            if output.finish is not None or output.refusal is not None:
                del self._rank_of[output.key]
        load = merge_loads([view.load for view in self._views])
        transfers = result.transfers and merge_transfers([view.transfers for view in self._views])
        self._on_result(msgspec.structs.replace(result, load=load, transfers=transfers), number)

    def freeze(self, seconds: float) -> None:
        """Make no progress for so long, once the step under way is over."""
        self.frozen_until = max(self.frozen_until, self._timeline.now + seconds)

    def slow(self, factor: float) -> None:
        """From the next step on, each takes this many times as long: one slow card holds up all."""
        self._ranks[0].device.slowness = factor

    def catch_up(self, ending_now: bool = True) -> float | None:
        """Nothing to do: ranks that step together take each step at once."""
        return None

    @property
    def taken(self) -> Mapping[int, int]:
        """Empty: each token was reported when it was drawn."""
        return {}

    @property
    def links(self) -> Sequence[Link]:
        return [link for rank in self._ranks for link in rank.links]

    @property
    def held_blocks(self) -> int:
        return sum(rank.held_blocks for rank in self._ranks)

    def drain_busy_seconds(self) -> float:
        """Seconds of the steps that have begun since the last call, averaged over the ranks."""
        return sum(rank.drain_busy_seconds() for rank in self._ranks) / len(self._ranks)

    def die(self) -> None:
        self.alive = False
        for rank in self._ranks:
            rank.die()

    def _choose(self, submit: Submit, booked: int | None) -> int:
        request = submit.request
        found = found_blocks(request.token_ids, request.cache_salt, self._views, request.sparse)
        outlooks = [view.outlook(blocks) for view, blocks in zip(self._views, found, strict=True)]
        most = self._ranks[0].ready.max_requests
        return choose_rank(outlooks, len(request.token_ids), not submit.remote_prefill, most, booked)

    def _turn(self) -> None:
        if not self.alive:
            return
        for rank in self._ranks:
            rank.take_messages()
        results: list[StepResult | None] = [None] * len(self._ranks)
        if any(rank.engine.has_work() for rank in self._ranks):
            results = self._step()
        ends = max(self.frozen_until, *(rank.now for rank in self._ranks))
        self._timeline.at(ends, partial(self._end_turn, results))

    def _step(self) -> list[StepResult | None]:
        proposals = [rank.engine.propose() for rank in self._ranks]
        first, *others = [proposal.shape for proposal in proposals]
        shape = reduce(agreed, map(packed, others), first)
        seconds = self._seconds_of([proposal.work for proposal in proposals], shape.decode_only)
        return [rank.step_as_agreed(shape, seconds) for rank in self._ranks]

    def _seconds_of(self, works: Sequence[StepWork], decode_only: bool) -> float:
        """Seconds that the slowest rank takes. works: what each rank computes in the step."""
        divided = None if decode_only else self._divided(works)
        prompts, others = sum(work.prompt_tokens for work in works), len(works) - 1
        return max(
            rank.device.seconds_of(work, decode_only, (prompts - work.prompt_tokens) / others, divided, len(works))
            for rank, work in zip(self._ranks, works, strict=True)
        )

    def _divided(self, works: Sequence[StepWork]) -> Chunk[Request] | None:
        """The chunk that all ranks compute together; None if there is none."""
        fewest, reach = self._parallel.divided_tokens, self._parallel.context_parallel_reach
        if fewest is None:
            return None
        longest = [max(work.chunks, key=lambda chunk: chunk.tokens, default=None) for work in works]
        offers = []
        for work, chunk in zip(works, longest, strict=True):
            tokens = 0 if chunk is None or chunk.tokens < fewest else chunk.tokens
            if chunk and reach is not None and chunk.request.progress.computed_at_most + tokens > reach:
                tokens = 0
            offers.append(Offer(tokens, len(work.decoding) + work.prompt_tokens - tokens))
        source = chosen(offers)
        return None if source is None else longest[source]

    def _end_turn(self, results: Sequence[StepResult | None]) -> None:
        if not self.alive:
            return
        for rank, result in zip(self._ranks, results, strict=True):
            rank.tell(result)
        self._busy = False
        if any(rank.goes_on for rank in self._ranks):
            self.wake()

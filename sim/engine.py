"""The product's engine, extended to take many decode steps at once with the same result as one after the other."""

from collections.abc import Callable, Mapping, Sequence

from engine.batch import StepShape
from engine.engine import Engine
from engine.plan.step_plan import StepPlan
from engine.protocol.messages import Output, StepResult
from engine.requests.request import Request
from engine.step.step_work import StepWork
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.outputs import FinishReason
from sim.device import END_OF_SEQUENCE

# Most steps that are looked ahead: the work for more is often lost because something arrives in between.
MOST_STEPS = 256
# A request fills a block, and is given one, every 64 steps. In a stretch of so many steps each happens at most once.
STRETCH = BLOCK_TOKENS


class SimulatedEngine(Engine):
    """`quiet_steps` says how many of the next steps bring each decoding request one token, and nothing else; `take`
    takes them.

    All steps have the same rows until a request arrives, begins to decode or ends. The tokens are known beforehand,
    since they count down (see sim.device). `take` therefore only registers full blocks, adds new ones, counts what the
    engine measures, and ends the requests that end with the last step, all in the order in which steps would do it.
    """

    # Whether the shortest of the prompts that arrive during one step goes first; if not, the earliest does.
    shortest_first = True
    # The requests of the quiet steps taken last; and, once a later step has begun, how many tokens each had before it.
    _quiet: Sequence[Request] = ()
    _taken: Mapping[int, int] | None = None
    # What the next step computes, if the worker's ranks agree on steps beforehand.
    _proposed: StepWork | None = None

    def quiet_steps(self) -> int:
        """How many of the next steps differ only in the lengths of their contexts; 0 if the next step is no such step.

        Requests may end with the last of them.
        """
        requests = self._schedule.decoding
        if not requests or self._unsettled:
            return 0
        # Every turn of every rank runs this: the loops call no function for each request, to be quick.
        steps, beyond = MOST_STEPS, 0
        for request in requests:
            token_ids = request.progress.token_ids
            tokens = len(token_ids)
            # Tokens until the request has its last one.
            left = min(token_ids[-1] - END_OF_SEQUENCE, request.limit - tokens)
            if left < 1 or tokens <= request.prompt_tokens:
                return 0
            if left < steps:
                steps = left
        for request in requests:
            progress = request.progress
            lacking = progress.computed + steps - progress.covered
            if lacking > 0:
                beyond += lacking
        # An upper bound of the blocks needed is enough: nearly always many more are free.
        return steps if beyond // BLOCK_TOKENS + len(requests) <= self.pool.free_blocks else 0

    @property
    def decoding_context(self) -> tuple[int, int]:
        """How many requests the next quiet step has, and how many computed tokens they have together."""
        requests = self._schedule.decoding
        return len(requests), sum(request.progress.computed for request in requests)

    def take(self, seconds: Sequence[float]) -> StepResult:
        """Take `len(seconds)` quiet steps, one after the other, that took so long.

        Returns one result for all of them. Only requests that ended have an output in it.
        """
        requests, steps = list(self._schedule.decoding), len(seconds)
        for begin in range(0, steps, STRETCH):
            self._take_stretch(requests, min(STRETCH, steps - begin))
        self._schedule.count(StepWork(requests), steps)
        self._pacing.took(seconds, len(requests))
        self._pipeline.steps += steps
        self._quiet, self._taken = requests, None
        for request in requests:
            token_ids = request.progress.token_ids
            if token_ids[-1] == END_OF_SEQUENCE or len(token_ids) == request.limit:
                # This output carries no tokens. Its position says how many tokens the request has.
                self._report.outputs.append(Output(request.key, len(token_ids), [], finish=_finish(request)))
                self._report.add_finished(len(token_ids) - request.prompt_tokens)
                self._schedule.withdraw(request)
                self._close(request)
        self._report.load_changed = True
        result = self._report.drain(self._pipeline.steps, len(self._requests), self._backend)
        assert result is not None
        return result

    def propose(self) -> StepShape:
        """Plan the next step, which `step` then takes. Returns what the worker's other ranks have to know of it."""
        self._enqueue_compiled()
        self._resume_arrived()
        self._proposed = super()._plan()
        return self._pacing.propose(self._proposed, self._schedule.waiting_prompts, self._wakefulness.stopping).shape

    @property
    def proposed(self) -> StepWork:
        assert self._proposed is not None
        return self._proposed

    def step(self, on_admitted: Callable[[], None] | None = None) -> StepResult | None:
        self._taken = self.taken
        return super().step(on_admitted)

    @property
    def taken(self) -> Mapping[int, int]:
        """By key, how many tokens requests had after the quiet steps taken last, which reported only requests' ends."""
        if self._taken is not None:
            return self._taken
        return {request.key: len(request.progress.token_ids) for request in self._quiet}

    @property
    def _arrival(self) -> tuple[int, int]:
        batch, position = super()._arrival
        return (batch, position) if self.shortest_first else (position, 0)

    def _plan(self) -> StepWork:
        proposed, self._proposed = self._proposed, None
        return super()._plan() if proposed is None else proposed

    @property
    def _unsettled(self) -> bool:
        """Whether the next step would do more than compute a token of each decoding request."""
        return bool(
            self._schedule.waiting
            or self._schedule.queued_prefill_tokens
            or self._report.pending
            or self._wakefulness.blocked
            or self._wakefulness.stopping
            or self.transfers.has_news
        )

    def _take_stretch(self, requests: Sequence[Request], steps: int) -> None:
        """Take at most STRETCH steps. Each request fills at most one block in them and is given at most one."""
        events = []
        for index, request in enumerate(requests):
            progress = request.progress
            computed = progress.computed
            # A step gives blocks to its rows before it computes them, and registers full blocks afterwards.
            given = progress.covered - computed + 1
            if given <= steps:
                events.append((given, 0, index))
            filled = (progress.registered_blocks + 1) * BLOCK_TOKENS - computed
            if filled <= steps:
                events.append((filled, 1, index))
        taken = dict[int, int]()
        for step, fills, index in sorted(events):
            request = requests[index]
            if fills:
                _advance(request, index, step - taken.get(index, 0))
                taken[index] = step
                self._schedule.register(request)
            else:
                self._schedule.carry_out(StepPlan([], [], [], [request], []))
        for index, request in enumerate(requests):
            _advance(request, index, steps - taken.get(index, 0))


def _finish(request: Request) -> FinishReason:
    """Why a request that has its last token ended."""
    return FinishReason.STOP if request.progress.token_ids[-1] == END_OF_SEQUENCE else FinishReason.LENGTH


def _advance(request: Request, index: int, steps: int) -> None:
    """Give the request the tokens of `steps` steps. index: its row in them."""
    if steps:
        progress = request.progress
        last = progress.token_ids[-1]
        progress.drew(range(last - 1, last - 1 - steps, -1), index)

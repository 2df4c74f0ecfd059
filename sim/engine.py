"""The product's engine, which can also take many decode steps at once, exactly as one after the other."""

from collections.abc import Callable, Mapping, Sequence

from engine.batch import StepShape
from engine.engine import Engine
from engine.protocol.messages import Output, StepResult
from engine.request import Request
from engine.step_plan import StepPlan
from engine.step_work import StepWork
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.outputs import FinishReason
from sim.device import END_OF_SEQUENCE

# Steps that are looked ahead at most: many are in vain if something comes in between.
MOST_STEPS = 256
# Between two events of one kind a request has so many steps, so that it has one of each in a stretch at most.
STRETCH = BLOCK_TOKENS


class SimulatedEngine(Engine):
    """`quiet_steps` says how many steps bring each decoding request one token, and nothing else; `take` takes them.

    Between two steps in which a request comes or begins to decode, or behind which one ends, all steps have the same
    rows. Their tokens count down (see sim.device), so that only blocks that fill, blocks that are added, what is
    measured and the ends behind the last step are left to be done, in the order in which steps would do it.
    """

    # Whether the shortest of the prompts that come during one step goes first; otherwise the earliest.
    shortest_first = True
    # The requests of the quiet steps taken last, and once another step has begun, how many tokens they had before it.
    _quiet: Sequence[Request] = ()
    _taken: Mapping[int, int] | None = None
    # What the next step computes, if its ranks agree on it beforehand.
    _proposed: StepWork | None = None

    def quiet_steps(self) -> int:
        """How many of the next steps differ from each other by nothing but their contexts; 0 if the next does.

        Requests may end with the last of them.
        """
        requests = self._schedule.decoding
        if not requests or self._unsettled:
            return 0
        # Every turn of every rank comes by here, so that nothing is called for each request.
        steps, beyond = MOST_STEPS, 0
        for request in requests:
            token_ids = request.progress.token_ids
            tokens = len(token_ids)
            # Until the request has its last token.
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
        # Most often there is room by far: a request needs a block every 64 steps.
        return steps if beyond // BLOCK_TOKENS + len(requests) <= self.pool.free_blocks else 0

    @property
    def decoding_context(self) -> tuple[int, int]:
        """How many requests the next quiet step has, and the tokens before theirs."""
        requests = self._schedule.decoding
        return len(requests), sum(request.progress.computed for request in requests)

    def take(self, seconds: Sequence[float]) -> StepResult:
        """Quiet steps that took so long, one after the other.

        Returns their result, in which only requests that ended have an output.
        """
        requests, steps = list(self._schedule.decoding), len(seconds)
        for begin in range(0, steps, STRETCH):
            self._take_stretch(requests, min(STRETCH, steps - begin))
        self._schedule.count(StepWork(requests), steps)
        self._meter.observe_decode_steps(seconds, len(requests))
        self._mixed_steps.observe_decode_steps(seconds)
        self._decodes = True
        self._pipeline.steps += steps
        self._quiet, self._taken = requests, None
        for request in requests:
            token_ids = request.progress.token_ids
            if token_ids[-1] == END_OF_SEQUENCE or len(token_ids) == request.limit:
                # Its last output counts tokens by their positions, and repeats none.
                self._report.outputs.append(Output(request.key, len(token_ids), [], finish=_finish(request)))
                self._meter.observe_finished(len(token_ids) - request.prompt_tokens)
                self._schedule.withdraw(request)
                self._close(request)
        self._report.load_changed = True
        result = self._report.drain(self._pipeline.steps, self.load, None, self._backend.drain_sparse_measures)
        assert result is not None
        return result

    def propose(self) -> StepShape:
        """Plan the next step, and say what of it the worker's other ranks have to know. `step` then takes it."""
        self._enqueue_compiled()
        self._resume_arrived()
        self._proposed = super()._plan()
        waiting, owes = self._schedule.waiting_prompts, self._mixed_steps.owes
        return self._proposed.shape(self._stopping, self._tails, waiting, owes)

    @property
    def proposed(self) -> StepWork:
        assert self._proposed is not None
        return self._proposed

    def step(self, on_admitted: Callable[[], None] | None = None) -> StepResult | None:
        self._taken = self.taken
        return super().step(on_admitted)

    @property
    def taken(self) -> Mapping[int, int]:
        """Tokens that requests had, by key, behind the steps taken last, which reported ends alone."""
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
            or self._blocked
            or self._stopping
            or self.transfers.has_news
        )

    def _take_stretch(self, requests: Sequence[Request], steps: int) -> None:
        """In a stretch each request fills one block and is given one at most."""
        events = []
        for index, request in enumerate(requests):
            progress = request.progress
            computed = progress.computed
            # A step gives blocks to its rows before it computes them, and finds full ones behind.
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
    """How the request, which has its last token, ended."""
    return FinishReason.STOP if request.progress.token_ids[-1] == END_OF_SEQUENCE else FinishReason.LENGTH


def _advance(request: Request, index: int, steps: int) -> None:
    """Row `index` of so many steps, launched and collected."""
    if steps:
        progress = request.progress
        last = progress.token_ids[-1]
        progress.drew(range(last - 1, last - 1 - steps, -1), index)

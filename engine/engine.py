"""The engine: requests in, tokens out, one step at a time. Knows token ids and block ids, and no tensor.

A step has phases: plan, agree on a shape with the other ranks, launch, draw, collect. With overlap a step is launched
before the one before it is collected: the device goes on while the host reads tokens, and each row's input token stays
on the device. A stop token is then noticed one step late, and that row of the next step is wasted.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.backend import Backend
from engine.blocks.kv_pool import BlockPool
from engine.config import EngineConfig
from engine.constraints.constraints import Constraints
from engine.moves.host_tier import HostTier
from engine.moves.transfers import Transfers
from engine.pace.pacing import Pacing
from engine.plan.schedule import RequestSchedule
from engine.plan.step_plan import Candidate, Limits
from engine.protocol.messages import Cancel, FirstToken, StepResult, Submit
from engine.requests.intake import Intake
from engine.requests.outcomes import Outcomes, refused
from engine.requests.report import Report
from engine.requests.request import Request
from engine.step.agreement import Agreement, OneRank
from engine.step.pipeline import StepPipeline
from engine.step.quiet_steps import take_quiet_steps
from engine.step.shape import StepShape
from engine.step.step_work import Proposal, StepWork
from engine.step.wakefulness import Wakefulness
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.workers import WorkerLoad
from mesh.errors import InvalidRequest, NamespaceMismatch
from transfer.config import TransferConfig

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

_log = logging.getLogger("deepmesh.engine")


class Engine:
    """Owns the requests and the block pool; drives one backend.

    Every submitted request ends in exactly one Output with `finish` or `refusal`, and holds no block after it; its
    transfers may hold some until the agent has ended them. What is submitted between two steps is one arrival batch.
    `clock` gives seconds and measures how long steps take. Without an `agent` no KV comes from elsewhere. `agreement`
    keeps this rank in step with the worker's other dp ranks, of which it is number `rank`. Without `constraints`,
    requests that have some are refused.

    Attributes:
        transfers: KV that moves in and out; handles the service's messages about transfers, and has news for it.
        stopped: all ranks agreed to compute no more; `step` is not called again.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        clock: Callable[[], float],
        agent: "TransferAgent | None" = None,
        agreement: Agreement | None = None,
        constraints: Constraints | None = None,
        rank: int = 0,
    ) -> None:
        self._backend = backend
        self._agreement = agreement or OneRank()
        self._intake = Intake(config, backend, constraints)
        slots = backend.host_slots()
        self._host = host = None if slots is None else HostTier(slots, backend.block_bytes)
        self.pool = BlockPool(backend.total_blocks, None if host is None else host.keep)
        self._pacing = Pacing(config, backend, rank)
        self._pipeline = StepPipeline(backend, config.launches_ahead(backend.asynchronous), clock)
        transfer = config.transfer or TransferConfig()
        self.transfers = Transfers(agent, self.pool, backend.namespace, transfer, backend.clear_drafts, host)
        limits = Limits(config.max_step_tokens, config.max_requests)
        hosted = None if host is None else host.blocks
        self._schedule = RequestSchedule(self.pool, limits, config.prefix_cache, self.transfers.would_wait, hosted)
        self._report = Report(self.pool, self.transfers, self._schedule, self._pacing, host)
        self._requests: dict[int, Request] = {}
        self._wakefulness = Wakefulness(
            self._requests, self._intake, self.transfers, self._pipeline, self._report, self._agreement
        )
        self._outcomes = Outcomes(
            self._requests, self._schedule, self.transfers, self._report, self._pipeline, self._wakefulness
        )
        self.stopped = False
        self._submitted = 0
        # What `step_as` computes next.
        self._proposal: Proposal | None = None

    def has_work(self) -> bool:
        """Whether a step now would do or report anything, before another message or event of the agent comes."""
        return self._wakefulness.has_work

    def submit(self, submit: Submit, arrival: tuple[int, int] | None = None) -> None:
        """arrival: the arrival batch and the order within it; by default the batch is the one of the next step."""
        assert submit.key not in self._requests
        request = self._intake.make(submit, arrival or (self._pipeline.steps, self._submitted))
        try:
            self._intake.check(submit)
            self.transfers.check(submit)
            self.transfers.expect(request)
        except InvalidRequest as error:
            self._report.outputs.append(refused(request, error))
            return
        self._submitted += 1
        self._requests[submit.key] = request
        if self._intake.begin(request, submit):
            self._enqueue(request)

    def cancel(self, cancel: Cancel) -> None:
        """End a request now, and its push. One that has ended already is left alone: the two messages crossed."""
        self.transfers.cancel_push(cancel.key)
        if (request := self._requests.get(cancel.key)) is None:
            return
        self._outcomes.cancel(request)

    def first_token(self, message: FirstToken) -> None:
        """The prefill worker drew a request's first token, which is not its last and which the service has passed on.

        The request goes on here once its KV has landed too.
        """
        if (request := self.transfers.awaiting_first_token(message.key)) is None:
            return
        self._wakefulness.changed()
        request.receive_first_token(message.token_id, message.drafts_end)
        self.transfers.on_first_token(request)

    def poll_transfers(self) -> None:
        """Note what the transfer agent reports. Call it when the agent wakes the rank, and between steps."""
        if self.transfers.poll():
            self._wakefulness.changed()
            self._report.load_changed = True

    def stop(self) -> None:
        """Compute no more, as soon as the worker's other ranks agree. Requests are lost."""
        self._wakefulness.stopping = True

    def step(self, on_admitted: Callable[[], None] | None = None) -> StepResult | None:
        """Launch a step, and collect one: the same, or with overlap the one before.

        None if there is nothing to report: no token, no end, no block that came or went, no change of transfers.
        `on_admitted` is called before anything is computed: landings that were opened need not wait for it.
        """
        proposal = self.propose()
        if on_admitted is not None:
            on_admitted()
        return self.step_as(self._agreement.agree(proposal.shape))

    def propose(self) -> Proposal:
        """Plan the next step, and admit requests to it. `step_as` has to follow, before anything else is called."""
        self._enqueue_compiled()
        self._resume_arrived()
        work = self._plan()
        left = self._schedule.prompts_left(work)
        self._proposal = self._pacing.propose(work, left, self._wakefulness.stopping)
        return self._proposal

    def step_as(self, shape: StepShape) -> StepResult | None:
        """Launch what was proposed, in the shape that all ranks agreed on, and collect a step: see `step`."""
        proposal, self._proposal = self._proposal, None
        assert proposal is not None, "a step is proposed before it is taken"
        self._pacing.agreed(shape)
        if shape.stopping:
            self.stopped = True
            return None
        work = proposal.work
        launched = self._pipeline.launch(work, shape, self.transfers.layer_watch)
        self._schedule.launched(work)
        if self._host is not None:
            self._host.write_ahead(self.pool)
        finished = self._pipeline.due(launched)
        moved = any(step is not None and step.work for step in (launched, finished))
        self._wakefulness.stepped(moved, proposal.held_back)
        if finished is not None:
            collected = self._pipeline.collect(finished)
            for request, row, sample in zip(finished.requests, finished.rows, collected.samples, strict=True):
                self._outcomes.commit(request, row, sample)
            self._pacing.collected(collected, self._report.drafts)
        self._pipeline.draw_rest()
        return self._report.drain(self._pipeline.steps, len(self._requests), self._backend)

    @property
    def decoding(self) -> Sequence[Request]:
        """The requests that compute a token in each step."""
        return self._schedule.decoding

    @property
    def quiet(self) -> bool:
        """Whether the next step would do no more than compute a token of each of `decoding`."""
        asleep = self._wakefulness.blocked or self._wakefulness.stopping
        prompts = self._schedule.waiting or self._schedule.queued_prefill_tokens
        return not (asleep or prompts or self._report.pending or self.transfers.has_news)

    def take(self, seconds: Sequence[float], tokens: Sequence[Sequence[int]]) -> StepResult:
        """Leave all as `step` would after consecutive quiet steps whose tokens are known, without computing them.

        seconds: how long each step took. tokens: for each of `decoding`, one for each step; only the last may end a
        request. The pool must have room for them. Of the outputs the result has only those that end requests, without
        tokens.
        """
        requests = take_quiet_steps(self._schedule, tokens)
        self._pipeline.steps += len(seconds)
        self._pacing.took(seconds, len(requests))
        for request in requests:
            self._outcomes.end_if_done(request)
        self._report.load_changed = True
        result = self._report.drain(self._pipeline.steps, len(self._requests), self._backend)
        assert result is not None
        return result

    def load(self) -> WorkerLoad:
        return self._report.load(len(self._requests))

    def _enqueue(self, request: Request) -> None:
        self._wakefulness.changed()
        request.stages.enter("engine.queue", prompt_tokens=request.prompt_tokens)
        self._schedule.enqueue(request)

    def _enqueue_compiled(self) -> None:
        """Queue requests whose grammars are compiled, and end those whose grammars could not be."""
        for request, error in self._intake.drain():
            if error is not None and not request.ended:
                self._outcomes.refuse(request, error)
            elif not request.ended:
                self._enqueue(request)

    def _resume_arrived(self) -> None:
        """Go on with requests whose KV has arrived, and end those whose transfer failed."""
        for request in self.transfers.drain_read():
            if not request.ended:
                self._schedule.register(request)
                self._begin(request)
        for request, error in self.transfers.drain_arrived():
            if error is not None and not request.ended:
                self._outcomes.refuse(request, error)
            elif not request.ended:
                self._schedule.register(request)
                self._run(request)

    def _run(self, request: Request) -> None:
        """Let the request take part in steps: it waits for no transfer."""
        request.stages.enter("engine.decode" if request.has_first_token else "engine.prompt")
        self._schedule.run(request)

    def _plan(self) -> StepWork:
        """The next step's work, empty if no request can go on before the step in flight is collected."""
        if self._wakefulness.stopping:
            return StepWork()
        schedule = self._schedule
        awaited = self.transfers.awaited
        limits = self._pacing.limits(len(schedule.decoding), schedule.prompts_ahead(awaited))
        plan = schedule.plan(awaited, limits, self.transfers.arriving)
        if plan.preempted and self._pipeline.rows_in_flight:
            # A preempted request starts again from its tokens, and the last one is not known yet.
            return StepWork()
        schedule.carry_out(plan)
        for candidate in plan.admitted:
            self._admit(candidate)
        # `_admit` ended a request if its ticket turned out to be for other blocks.
        chunks = [chunk for chunk in plan.chunks if not chunk.request.ended]
        # A rank without work proposes no drafts.
        depth = self._pacing.depth(len(plan.decoding)) if plan.decoding or chunks else 0
        return StepWork(plan.decoding, chunks, depth)

    def _admit(self, candidate: Candidate[Request]) -> None:
        request = candidate.request
        if request.cached_tokens is None:
            request.host_cached_tokens = len(candidate.hosted) * BLOCK_TOKENS
            request.cached_tokens = len(candidate.cached_blocks) * BLOCK_TOKENS + request.host_cached_tokens
        if candidate.hosted:
            request.stages.enter("engine.await_kv")
            self.transfers.read_host(request, candidate.hosted)
        else:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        """Let the request run, or wait for what this rank's memory lacks of its KV."""
        waits = self.transfers.would_wait(request, request.progress.registered_blocks)
        if waits:
            request.stages.enter("engine.await_kv")
        try:
            self.transfers.begin(request, waits)
        except (InvalidRequest, NamespaceMismatch) as error:
            self.transfers.cancel_push(request.key)
            self._outcomes.refuse(request, error)
            return
        if not waits:
            self._run(request)

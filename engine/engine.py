"""The engine: requests in, tokens out, one step at a time. Knows token ids and block ids, and no tensor.

With overlap a step is launched before the one before it is collected: the device goes on while the host reads tokens,
and each row's input token stays on the device. A stop token is then noticed one step late, and that row of the next
step is wasted.
"""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine.batch import Backend, Batch, Row, Sample
from engine.batcher import Candidate, Chunk, Limits, StepPlan, blocks_for, must_preempt, plan_step
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.in_flight import InFlightStep, launch_chunk_row, launch_decode_row
from engine.kv_pool import BlockPool
from engine.load import LoadMeter
from engine.moves.transfers import Transfers
from engine.outputs import cancelled, next_output, refused
from engine.protocol.messages import Cancel, FirstToken, Output, StepResult, Submit
from engine.request import Request
from engine.running import Running
from engine.submission import Room, check, make_request
from engine.waiting import WaitingQueue
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.outputs import FinishReason
from mesh.domain.workers import WorkerLoad
from mesh.errors import InvalidRequest, MeshError, NamespaceMismatch
from mesh.observe import span
from transfer.config import TransferConfig

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

_log = logging.getLogger("deepmesh.engine")


class Engine:
    """Owns the requests and the block pool; drives one backend.

    Every submitted request ends in exactly one Output with `finish` or `refusal`, and holds no block after it; its
    transfers may hold some until the agent has ended them. What is submitted between two steps is one arrival batch.
    `clock` gives seconds and only measures load. Without an `agent` no KV comes from elsewhere.

    Attributes:
        transfers: takes the frames that concern transfers alone, and gives news of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        clock: Callable[[], float],
        agent: "TransferAgent | None" = None,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._overlap = config.overlap == "on" or (config.overlap == "auto" and backend.asynchronous)
        self._limits = Limits(config.max_step_tokens, config.max_requests)
        # A request longer than the pool could never finish.
        self.context_tokens = min(backend.context_tokens, backend.total_blocks * BLOCK_TOKENS)
        self._room = Room(self.context_tokens, backend.vocabulary_size)
        self.pool = BlockPool(backend.total_blocks)
        self._block_tables = BlockTables(self.pool, config.prefix_cache)
        self._meter = LoadMeter()
        transfer = config.transfer or TransferConfig()
        self.transfers = Transfers(agent, self.pool, backend.namespace.layers, transfer, self._meter)
        self._requests: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        self._running = Running()
        # Launched and not collected; only with overlap.
        self._in_flight: InFlightStep | None = None
        self._collected_at = 0.0
        # The last step could do nothing, until a transfer gives back blocks or something else changes.
        self._blocked = False
        # What transfers ended may have changed the load.
        self._moved = False
        # Ends and first tokens that no step of ours brought.
        self._told: list[Output] = []
        self._step = 0
        self._submitted = 0

    def has_work(self) -> bool:
        """Whether a step would do or tell anything before the next message, or event of the agent."""
        can_go_on = len(self._requests) > self.transfers.awaited and not self._blocked
        return bool(can_go_on or self._told or self._in_flight or self._moved or self.transfers.changed)

    def submit(self, submit: Submit) -> None:
        assert submit.key not in self._requests
        request = make_request(submit, self._backend.eos_token_ids, (self._step, self._submitted))
        try:
            check(submit, self._room)
            self.transfers.check(submit)
            self.transfers.expect(request)
        except InvalidRequest as error:
            self._told.append(refused(request, error))
            return
        self._submitted += 1
        self._requests[submit.key] = request
        self._blocked = False
        self._enqueue(request)

    def cancel(self, cancel: Cancel) -> None:
        """End a request now, and its push. One that has ended already is left alone: the two messages crossed."""
        self.transfers.cancel_push(cancel.key)
        request = self._requests.get(cancel.key)
        if request is None:
            return
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        self._told.append(cancelled(request))
        self._close(request)

    def first_token(self, message: FirstToken) -> None:
        """Go on from here with a request whose prompt was computed elsewhere, once its KV has landed too."""
        request = self.transfers.awaiting_first_token(message.key)
        if request is None:
            return
        request.cached_tokens, request.store_cached_tokens = message.cached_tokens, message.store_cached_tokens
        output = next_output(request, Sample(message.token_id, message.logprobs))
        request.progress.received(output.token_ids)
        self._told.append(output)
        if output.finish is None:
            self.transfers.on_first_token(request)
        else:
            self._close(request)

    def follow_transfers(self) -> None:
        """Take what the transfer agent tells. Call it when the agent wakes, and between steps."""
        if self.transfers.follow():
            self._blocked, self._moved = False, True

    def step(self, on_admitted: Callable[[], None] | None = None) -> StepResult | None:
        """Launch a step, and collect one: the same, or with overlap the one before.

        None where it has nothing to tell: no token, no end, no block that came or went, no change of transfers.
        `on_admitted` is called before anything is computed: landings that were opened need not wait for it.
        """
        self._take_arrived()
        launched = finished = self._launch(on_admitted)
        if self._overlap:
            finished, self._in_flight = self._in_flight, launched
        self._blocked = launched is None and finished is None
        waits = self.transfers.open or self.transfers.awaited
        assert not self._blocked or waits or not self._requests, "work that no step takes on"
        collected = [] if finished is None else self._collect(finished)
        outputs, self._told = [*self._told, *collected], []
        changes, counters = self.pool.take_changes(), self.transfers.take_counters()
        if not (outputs or changes.stored or changes.removed or counters or self._moved):
            return None
        self._moved = False
        return StepResult(
            self._step, outputs, self.load(), changes.stored, changes.parents, changes.removed, transfers=counters
        )

    def load(self) -> WorkerLoad:
        return self._meter.load(
            running=len(self._requests) - len(self._waiting),
            waiting=len(self._waiting),
            queued_prefill_tokens=self._waiting.tokens + self._running.prompt_tokens,
            free_blocks=self.pool.free_blocks,
        )

    def _take_arrived(self) -> None:
        """Let requests go on whose KV has come from elsewhere, and end those whose KV is not coming."""
        for request, error in self.transfers.take_arrived():
            if request.ended:
                continue
            if error is not None:
                self._refuse(request, error)
                continue
            self._block_tables.register(request)
            self._running.add(request)

    def _refuse(self, request: Request, error: MeshError) -> None:
        self._told.append(refused(request, error))
        self._close(request)

    def _enqueue(self, request: Request) -> None:
        cached = len(self._block_tables.match(request)) * BLOCK_TOKENS
        self._waiting.add(request, 0 if request.lands else len(request.progress.token_ids) - cached)

    def _candidates(self) -> Iterator[Candidate[Request]]:
        for request in self._waiting:
            cached = self._block_tables.match(request)
            new_blocks = blocks_for(len(request.progress.token_ids)) - len(cached)
            waits = self.transfers.would_wait(request, len(cached))
            yield Candidate(request, cached, new_blocks + self.pool.free_among(cached), waits)

    def _launch(self, on_admitted: Callable[[], None] | None) -> InFlightStep | None:
        """None where no request can go on before the step under way is collected."""
        if self._in_flight is not None and must_preempt(self._running.decoding, self.pool.free_blocks):
            # A preempted request starts again from its tokens, and the last one is not known yet.
            return None
        plan = plan_step(
            self._running.decoding,
            self._running.prompts,
            self._candidates(),
            self.pool.free_blocks,
            self.pool.references,
            self._limits,
            self.transfers.awaited,
        )
        self._apply(plan)
        if on_admitted is not None:
            on_admitted()
        # One whose ticket turned out to be for other blocks has ended.
        chunks = [chunk for chunk in plan.chunks if not chunk.request.ended]
        return self._launch_rows(plan.decoding, chunks) if plan.decoding or chunks else None

    def _apply(self, plan: StepPlan[Request]) -> None:
        """Bring blocks and queues to where the plan's rows can be computed."""
        for request in plan.preempted:
            self._preempt(request)
        # Before any allocation, which might evict them.
        for candidate in plan.admitted:
            self.pool.acquire(candidate.cached_blocks)
        for request in plan.growing:
            self._block_tables.grow(request)
        for candidate in plan.admitted:
            self._admit(candidate)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._block_tables.release(request)
        self._enqueue(request)

    def _admit(self, candidate: Candidate[Request]) -> None:
        request = candidate.request
        self._waiting.remove(request)
        self._block_tables.fill(request, candidate.cached_blocks)
        if request.cached_tokens is None:
            request.cached_tokens = request.progress.computed
        try:
            self.transfers.begin(request, candidate.waits)
        except (InvalidRequest, NamespaceMismatch) as error:
            self.transfers.cancel_push(request.key)
            self._refuse(request, error)
            return
        if not candidate.waits:
            self._running.add(request)

    def _launch_rows(self, decoding: list[Request], chunks: list[Chunk[Request]]) -> InFlightStep:
        # A chunk of one token is computed as a decode row is.
        chunks = sorted(chunks, key=lambda chunk: chunk.tokens > 1)
        requests = [*decoding, *(chunk.request for chunk in chunks)]
        rows = [launch_decode_row(request, index) for index, request in enumerate(decoding)]
        rows += [launch_chunk_row(chunk, index) for index, chunk in enumerate(chunks, len(decoding))]
        ends = ((request, row.end) for request, row in zip(requests, rows, strict=True))
        on_layers = self.transfers.layer_watch(ends)
        if chunks or any(request.progress.tokens_at_least >= request.limit for request in decoding):
            self._running.sort()
        step, self._step = self._step, self._step + 1
        started = self._clock()
        with span("engine.step", step=step, decoding=len(decoding), prompts=len(chunks)):
            launched = self._backend.launch(Batch(step, rows, on_layers))
        prompt_tokens = sum(chunk.tokens for chunk in chunks)
        return InFlightStep(requests, rows, launched, started, len(decoding), prompt_tokens)

    def _collect(self, step: InFlightStep) -> list[Output]:
        with span("engine.collect"):
            samples = step.launched.collect()
        now = self._clock()
        # A step launched ahead began when the one before it ended.
        self._meter.observe_step(now - max(step.started, self._collected_at), step.decoding, step.prompt_tokens)
        self._collected_at = now
        outputs = []
        for request, row, sample in zip(step.requests, step.rows, samples, strict=True):
            output = self._commit(request, row, sample)
            if output is not None:
                outputs.append(output)
        return outputs

    def _commit(self, request: Request, row: Row, sample: Sample | None) -> Output | None:
        progress = request.progress
        draws = 0 if sample is None else 1
        if request.ended:
            progress.committed(row.tokens, draws, ())
            self._release_ended(request)
            return None
        if sample is None:
            output = None
            progress.committed(row.tokens, 0, ())
        else:
            output = next_output(request, sample)
            progress.committed(row.tokens, 1, output.token_ids)
        if progress.computed // BLOCK_TOKENS > progress.registered_blocks:
            self._block_tables.register(request)
        if request.push is not None:
            self.transfers.on_computed(request, progress.computed)
        if output is not None and output.finish is not None:
            self._meter.observe_finished(len(progress.token_ids) - request.prompt_tokens)
            if output.finish is FinishReason.STOP:
                self._running.remove(request)
            self._close(request)
        return output

    def _close(self, request: Request) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            fields = {"request_id": request.request_id, "tokens": len(request.progress.token_ids), "step": self._step}
            _log.debug("request ended", extra={"fields": fields})
        del self._requests[request.key]
        request.ended = True
        self._blocked = False
        self.transfers.give_up(request)
        self._release_ended(request)

    def _release_ended(self, request: Request) -> None:
        if not request.progress.rows_in_flight:
            self._block_tables.release(request)

"""The engine: requests in, tokens out, one step at a time. Knows token ids and block ids, and no tensor.

With overlap a step is launched before the one before it is collected: the device goes on while the host reads tokens,
and each row's input token stays on the device. A stop token is then noticed one step late, and that row of the next
step is wasted.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Literal

from engine.batch import Backend, Batch, Row, Sample
from engine.batcher import Candidate, Chunk, Limits, StepPlan, blocks_for, must_preempt, plan_step
from engine.config import EngineConfig
from engine.flight import Flight
from engine.kv_pool import BlockPool
from engine.load import LoadMeter
from engine.messages import Cancel, Output, Refusal, StepResult, Submit
from engine.request import Request
from engine.waiting import WaitingQueue
from mesh.blocks import BLOCK_TOKENS, root_hash
from mesh.errors import ContextExceeded, InvalidRequest
from mesh.observe import span
from mesh.workers import WorkerLoad

_log = logging.getLogger("deepmesh.engine")


class Engine:
    """Owns the requests and the block pool; drives one backend.

    Every submitted request ends in exactly one Output with `finish` or `refusal`, and holds no block after it. What is
    submitted between two steps is one arrival batch. `clock` gives seconds and only measures load.
    """

    def __init__(self, config: EngineConfig, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._clock = clock
        self._prefix_cache = config.prefix_cache
        self._overlap = config.overlap == "on" or (config.overlap == "auto" and backend.asynchronous)
        self._limits = Limits(config.max_step_tokens, config.max_requests)
        # A request longer than the pool could never finish.
        self.context_tokens = min(backend.context_tokens, backend.total_blocks * BLOCK_TOKENS)
        self.pool = BlockPool(backend.total_blocks)
        self._requests: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        # Running with more than one token left to compute.
        self._prompts: list[Request] = []
        # Running with one.
        self._decoding: list[Request] = []
        # Launched and not collected; only with overlap.
        self._under_way: Flight | None = None
        self._collected_at = 0.0
        self._meter = LoadMeter()
        # Of requests that ended outside a step.
        self._ended: list[Output] = []
        self._step = 0
        self._submitted = 0

    def has_work(self) -> bool:
        return bool(self._requests or self._ended or self._under_way)

    def submit(self, submit: Submit) -> None:
        assert submit.key not in self._requests
        try:
            self._check(submit)
        except InvalidRequest as error:
            self._ended.append(Output(submit.key, 0, [], refusal=Refusal(error.reason, error.message)))
            return
        eos = frozenset() if submit.ignore_eos else self._backend.eos_token_ids
        request = Request(
            key=submit.key,
            request_id=submit.request_id,
            token_ids=list(submit.token_ids),
            prompt_tokens=len(submit.token_ids),
            limit=len(submit.token_ids) + submit.max_tokens,
            stop_token_ids=eos.union(submit.stop_token_ids),
            sampling=submit.sampling,
            root=root_hash(submit.cache_salt),
            arrival=(self._step, self._submitted),
        )
        self._submitted += 1
        self._requests[submit.key] = request
        self._enqueue(request)

    def cancel(self, cancel: Cancel) -> None:
        """End a request now. One that has ended already is left alone: the two messages crossed."""
        request = self._requests.get(cancel.key)
        if request is None:
            return
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._stop_running(request)
        self._ended.append(Output(request.key, len(request.token_ids), [], finish="cancelled"))
        self._close(request)

    def step(self) -> StepResult | None:
        """Launch a step, and collect one: the same, or with overlap the one before.

        None where it has nothing to tell: no token, no end, no block that came or went.
        """
        outputs, self._ended = self._ended, []
        launched = finished = self._launch()
        if self._overlap:
            finished, self._under_way = self._under_way, launched
        assert launched or finished or not self._requests, "work that no step takes on"
        if finished is not None:
            outputs += self._collect(finished)
        changes = self.pool.take_changes()
        if not (outputs or changes.stored or changes.removed):
            return None
        return StepResult(self._step, outputs, self.load(), changes.stored, changes.removed)

    def load(self) -> WorkerLoad:
        prompt_tokens = sum(request.left for request in self._prompts)
        return self._meter.load(
            running=len(self._requests) - len(self._waiting),
            waiting=len(self._waiting),
            queued_prefill_tokens=self._waiting.tokens + prompt_tokens,
            free_blocks=self.pool.free_blocks,
        )

    def _check(self, submit: Submit) -> None:
        """Raises InvalidRequest. The gateway has checked all this; a backend fed otherwise may take the rank down."""
        if not submit.token_ids:
            raise InvalidRequest("the prompt is empty: send at least one token", field="prompt")
        if submit.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
        vocabulary_size = self._backend.vocabulary_size
        if min(submit.token_ids) < 0 or max(submit.token_ids) >= vocabulary_size:
            raise InvalidRequest(f"token ids must be from 0 to {vocabulary_size - 1}", field="prompt")
        total = len(submit.token_ids) + submit.max_tokens
        if total > self.context_tokens:
            raise ContextExceeded(
                f"{len(submit.token_ids)} prompt tokens and max_tokens {submit.max_tokens} make {total}, and this"
                f" worker has room for {self.context_tokens}: shorten the prompt or lower max_tokens"
            )

    def _enqueue(self, request: Request) -> None:
        cached = len(self._match(request)) * BLOCK_TOKENS
        self._waiting.add(request, len(request.token_ids) - cached)

    def _match(self, request: Request) -> list[int]:
        if not self._prefix_cache:
            return []
        # The last token is always computed: its logits are what the request waits for.
        full_blocks = (len(request.token_ids) - 1) // BLOCK_TOKENS
        return self.pool.match_prefix(request.full_block_hashes(full_blocks))

    def _candidates(self) -> Iterator[Candidate[Request]]:
        for request in self._waiting:
            cached = self._match(request)
            new_blocks = blocks_for(len(request.token_ids)) - len(cached)
            yield Candidate(request, cached, new_blocks + self.pool.free_among(cached))

    def _launch(self) -> Flight | None:
        """None where no request can go on before the step under way is collected."""
        if self._under_way is not None and must_preempt(self._decoding, self.pool.free_blocks):
            # A preempted request starts again from its tokens, and the last one is not known yet.
            return None
        plan = plan_step(
            self._decoding,
            self._prompts,
            self._candidates(),
            self.pool.free_blocks,
            self.pool.references,
            self._limits,
        )
        self._apply(plan)
        return self._launch_plan(plan) if plan.decoding or plan.chunks else None

    def _apply(self, plan: StepPlan[Request]) -> None:
        """Bring blocks and queues to where the plan's rows can be computed."""
        for request in plan.preempted:
            self._preempt(request)
        # Before any allocation, which might evict them.
        for candidate in plan.admitted:
            self.pool.acquire(candidate.cached_blocks)
        for request in plan.growing:
            request.block_ids.extend(self.pool.allocate(1))
        for candidate in plan.admitted:
            self._admit(candidate)

    def _preempt(self, request: Request) -> None:
        assert not request.rows_under_way
        self._stop_running(request)
        self.pool.release(request.block_ids)
        request.forget_blocks()
        self._enqueue(request)

    def _admit(self, candidate: Candidate[Request]) -> None:
        request, cached = candidate.request, candidate.cached_blocks
        self._waiting.remove(request)
        new_blocks = blocks_for(len(request.token_ids)) - len(cached)
        request.block_ids.extend([*cached, *self.pool.allocate(new_blocks)])
        request.registered_blocks = len(cached)
        request.computed = len(cached) * BLOCK_TOKENS
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        self._prompts.append(request)

    def _launch_plan(self, plan: StepPlan[Request]) -> Flight:
        # A chunk of one token is computed as a decode row is.
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.tokens > 1)
        requests = [*plan.decoding, *(chunk.request for chunk in chunks)]
        rows = [_decode_row(request) for request in plan.decoding]
        rows += [_chunk_row(chunk) for chunk in chunks]
        started = self._clock()
        with span("engine.step", step=self._step, decoding=len(plan.decoding), prompts=len(chunks)):
            launched = self._backend.launch(Batch(self._step, rows))
        self._step += 1
        for index, (request, row) in enumerate(zip(requests, rows, strict=True)):
            _follow(request, row, index)
        if chunks or any(request.length == request.limit for request in plan.decoding):
            self._sort_running()
        prompt_tokens = sum(chunk.tokens for chunk in chunks)
        return Flight(requests, rows, launched, started, len(plan.decoding), prompt_tokens)

    def _collect(self, flight: Flight) -> list[Output]:
        with span("engine.collect"):
            samples = flight.launched.collect()
        now = self._clock()
        # A step launched ahead began when the one before it ended.
        self._meter.observe_step(now - max(flight.started, self._collected_at), flight.decoding, flight.prompt_tokens)
        self._collected_at = now
        outputs = []
        for request, row, sample in zip(flight.requests, flight.rows, samples, strict=True):
            output = self._commit(request, row, sample)
            if output is not None:
                outputs.append(output)
        return outputs

    def _commit(self, request: Request, row: Row, sample: Sample | None) -> Output | None:
        request.rows_under_way -= 1
        if request.ended:
            self._release_ended(request)
            return None
        if row.end // BLOCK_TOKENS > request.registered_blocks:
            self._register_full_blocks(request, row.end // BLOCK_TOKENS)
        if sample is None:
            return None
        request.draws_under_way -= 1
        output = _append(request, sample)
        if output.finish is not None:
            self._meter.observe_finished(len(request.token_ids) - request.prompt_tokens)
            if output.finish == "stop":
                self._stop_running(request)
            self._close(request)
        return output

    def _register_full_blocks(self, request: Request, full_blocks: int) -> None:
        if self._prefix_cache:
            hashes = request.full_block_hashes(full_blocks)
            for index in range(request.registered_blocks, full_blocks):
                self.pool.register(request.block_ids[index], hashes[index])
        request.registered_blocks = full_blocks

    def _close(self, request: Request) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            fields = {"request_id": request.request_id, "tokens": len(request.token_ids), "step": self._step}
            _log.debug("request ended", extra={"fields": fields})
        del self._requests[request.key]
        request.ended = True
        self._release_ended(request)

    def _release_ended(self, request: Request) -> None:
        if not request.rows_under_way:
            self.pool.release(request.block_ids)
            request.forget_blocks()

    def _stop_running(self, request: Request) -> None:
        """Compute no more of it. One whose last token is under way is in neither list."""
        for running in (self._prompts, self._decoding):
            if request in running:
                running.remove(request)

    def _sort_running(self) -> None:
        """Drop requests whose last token is under way, and move prompts that are computed to the decoding ones."""
        running = [request for request in (*self._decoding, *self._prompts) if request.length < request.limit]
        self._decoding = [request for request in running if request.left == 1]
        self._prompts = [request for request in running if request.left > 1]


def _decode_row(request: Request) -> Row:
    if request.draws_under_way:
        return Row((), request.computed, request.block_ids, request.sampling, follows=request.drawing_row)
    return Row(request.token_ids[-1:], request.computed, request.block_ids, request.sampling)


def _chunk_row(chunk: Chunk[Request]) -> Row:
    request = chunk.request
    end = request.computed + chunk.tokens
    sampling = request.sampling if end == len(request.token_ids) else None
    return Row(request.token_ids[request.computed : end], request.computed, request.block_ids, sampling)


def _follow(request: Request, row: Row, index: int) -> None:
    """Note what the launched row does, as if it were done."""
    request.computed = row.end
    request.rows_under_way += 1
    if row.sampling is not None:
        request.draws_under_way += 1
        request.drawing_row = index


def _append(request: Request, sample: Sample) -> Output:
    position = len(request.token_ids)
    request.token_ids.append(sample.token_id)
    finish: Literal["stop", "length"] | None = None
    if sample.token_id in request.stop_token_ids:
        finish = "stop"
    elif position + 1 == request.limit:
        finish = "length"
    logprobs = None if sample.logprobs is None else [sample.logprobs]
    cached_tokens = request.cached_tokens if position == request.prompt_tokens else None
    return Output(request.key, position, [sample.token_id], logprobs, cached_tokens, finish)

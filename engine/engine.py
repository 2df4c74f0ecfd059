"""The engine: requests in, tokens out, one step at a time. Knows token ids and block ids, and no tensor."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from engine.batch import Backend, Batch, Row, Sample
from engine.batcher import Candidate, Chunk, Limits, StepPlan, blocks_for, plan_step
from engine.config import EngineConfig
from engine.kv_pool import BlockPool
from engine.load import LoadMeter
from engine.messages import Cancel, Load, Output, Refusal, StepResult, Submit
from engine.request import Request
from engine.waiting import WaitingQueue
from mesh.blocks import BLOCK_TOKENS, root_hash
from mesh.errors import ContextExceeded, InvalidRequest
from mesh.observe import span

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
        self._meter = LoadMeter()
        # Of requests that ended outside a step.
        self._ended: list[Output] = []
        self._step = 0
        self._submitted = 0

    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

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
            (self._prompts if request in self._prompts else self._decoding).remove(request)
        self._ended.append(Output(request.key, len(request.token_ids), [], finish="cancelled"))
        self._close(request)

    def step(self) -> StepResult | None:
        """Compute one step. None where it has nothing to tell: no token, no end, no block that came or went."""
        started = self._clock()
        outputs, self._ended = self._ended, []
        plan = plan_step(
            self._decoding,
            self._prompts,
            self._candidates(),
            self.pool.free_blocks,
            self.pool.references,
            self._limits,
        )
        self._apply(plan)
        if plan.decoding or plan.chunks:
            outputs += self._compute(plan)
            prompt_tokens = sum(chunk.tokens for chunk in plan.chunks)
            self._meter.observe_step(self._clock() - started, len(plan.decoding), prompt_tokens)
        assert plan.decoding or plan.chunks or not self._requests, "work that no step takes on"
        changes = self.pool.take_changes()
        if not (outputs or changes.stored or changes.removed):
            return None
        return StepResult(self._step, outputs, self.load(), changes.stored, changes.removed)

    def load(self) -> Load:
        prompt_tokens = sum(len(request.token_ids) - request.computed for request in self._prompts)
        return self._meter.load(
            running=len(self._decoding) + len(self._prompts),
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
        (self._prompts if request in self._prompts else self._decoding).remove(request)
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

    def _compute(self, plan: StepPlan[Request]) -> list[Output]:
        # A chunk of one token is computed as a decode row is.
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.tokens > 1)
        requests = [*plan.decoding, *(chunk.request for chunk in chunks)]
        rows = [_decode_row(request) for request in plan.decoding]
        rows += [_chunk_row(chunk) for chunk in chunks]
        with span("engine.step", step=self._step, decoding=len(plan.decoding), prompts=len(chunks)):
            samples = self._backend.execute(Batch(self._step, rows))
        self._step += 1
        unfinished = len(self._requests)
        outputs = self._commit(requests, rows, samples)
        if chunks or len(self._requests) < unfinished:
            self._sort_running()
        return outputs

    def _commit(
        self, requests: Iterable[Request], rows: Iterable[Row], samples: Iterable[Sample | None]
    ) -> list[Output]:
        outputs = []
        for request, row, sample in zip(requests, rows, samples, strict=True):
            request.computed = row.end
            if request.computed // BLOCK_TOKENS > request.registered_blocks:
                self._register_full_blocks(request)
            if sample is None:
                continue
            output = _append(request, sample)
            outputs.append(output)
            if output.finish is not None:
                self._meter.observe_finished(len(request.token_ids) - request.prompt_tokens)
                self._close(request)
        return outputs

    def _register_full_blocks(self, request: Request) -> None:
        full_blocks = request.computed // BLOCK_TOKENS
        if self._prefix_cache:
            hashes = request.full_block_hashes(full_blocks)
            for index in range(request.registered_blocks, full_blocks):
                self.pool.register(request.block_ids[index], hashes[index])
        request.registered_blocks = full_blocks

    def _close(self, request: Request) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            fields = {"request_id": request.request_id, "tokens": len(request.token_ids), "step": self._step}
            _log.debug("request ended", extra={"fields": fields})
        self.pool.release(request.block_ids)
        request.forget_blocks()
        del self._requests[request.key]

    def _sort_running(self) -> None:
        """Drop closed requests, and move prompts that are computed to the decoding ones."""
        running = [request for request in (*self._decoding, *self._prompts) if request.block_ids]
        self._decoding = [request for request in running if len(request.token_ids) - request.computed == 1]
        self._prompts = [request for request in running if len(request.token_ids) - request.computed > 1]


def _decode_row(request: Request) -> Row:
    return Row(request.token_ids[-1:], request.computed, request.block_ids, request.sampling)


def _chunk_row(chunk: Chunk[Request]) -> Row:
    request = chunk.request
    end = request.computed + chunk.tokens
    sampling = request.sampling if end == len(request.token_ids) else None
    return Row(request.token_ids[request.computed : end], request.computed, request.block_ids, sampling)


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

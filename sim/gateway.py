"""Clients and their gateway: each request from its arrival to its one end. It is placed again if its worker is lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.protocol.messages import Output
from gateway.config import DispatchConfig
from gateway.requests import settled_sparse_prefill
from gateway.retries import Retries, attempt_outcome
from loadgen.records import RequestRecord
from mesh.blocks import chain_hashes
from mesh.domain.placement import AttemptOutcome, AttemptReport, Placement, PlacementQuery
from mesh.domain.requests import Submission, TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.shares import ONE_TENANT, Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.errors import MeshError, NoWorker
from sim.asked import Asked
from sim.job import Job
from sim.scheduling import SimulatedScheduler
from sim.timeline import Timeline
from sim.worker import SimulatedWorker

GREEDY = Sampling()
# Stands in for what an ended request asked.
FORGOTTEN = Asked(0.0, (), 0, 0)


@dataclass(slots=True, eq=False)
class Live:
    """A request under way."""

    number: int
    asked: Asked
    record: RequestRecord
    hashes: Sequence[bytes]
    retries: Retries
    sparse: SparsePrefill | None = None
    tenant: str = ""
    tokens: int = 0
    cached_tokens: int = 0
    store_cached_tokens: int = 0
    host_cached_tokens: int = 0
    predicted_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None
    prefill_id: str | None = None
    decode_id: str | None = None
    worker: SimulatedWorker | None = None
    job: Job | None = None
    replaced: int = 0

    def forget_texts(self) -> None:
        """Called when the request has ended. Memory holds the results of a million requests, but not their prompts."""
        self.asked, self.hashes = FORGOTTEN, ()


class SimulatedGateway:
    """`on_end` gets each request once, when it has ended."""

    def __init__(
        self,
        timeline: Timeline,
        scheduler: SimulatedScheduler,
        worker: Callable[[str], SimulatedWorker | None],
        config: DispatchConfig,
        model: str,
        call_seconds: float,
        fair: bool,
        sparse: SparsePrefill | None,
        every_token: bool,
        on_end: Callable[[Live], None],
    ) -> None:
        """call_seconds: time of a request from the client to a worker, half of which has passed when it is placed; and
        time of a token from the worker to the client.

        sparse: how workers attend to long prompts; None if exactly. every_token: whether each token's time is kept,
        rather than only those of the first and the last.
        """
        self.live = 0
        self._timeline = timeline
        self._scheduler = scheduler
        self._worker = worker
        self._config = config
        self._model = model
        self._call_seconds = call_seconds
        self._fair = fair
        self._sparse = sparse
        self._every_token = every_token
        self._on_end = on_end
        self.asked = 0

    def ask(self, asked: Asked) -> None:
        """A request arrives now."""
        number, self.asked = self.asked, self.asked + 1
        self.live += 1
        record = RequestRecord(number, self._timeline.now, asked.max_tokens, prompt_tokens=len(asked.token_ids))
        salt = asked.share.tenant.encode()
        sparse = settled_sparse_prefill(None, self._sparse, len(asked.token_ids))
        hashes, retries = chain_hashes(asked.token_ids, salt, sparse), Retries(self._config, lambda: self._timeline.now)
        live = Live(number, asked, record, hashes, retries, sparse, asked.share.tenant)
        self._timeline.after(self._call_seconds / 2, lambda: self._place(live, None))

    def _place(self, live: Live, cause: MeshError | None) -> None:
        """Place the request; if that fails, try again later or end it. cause: why it is placed again; None at first."""
        live.retries.begin()
        try:
            answer = self._scheduler.place(self._query(live))
        except MeshError as refusal:
            try:
                cause = live.retries.settle_refusal(refusal, cause)
            except MeshError as final:
                self._end(live, final)
            else:
                self._again(live, cause)
            return
        if live.predicted_ttft_ms is None:
            live.predicted_ttft_ms, live.predicted_tpot_ms = answer.chosen.ttft_ms, answer.chosen.tpot_ms
        self._timeline.soon(self._call_seconds / 2, lambda: self._submit(live, answer.placement))

    def _query(self, live: Live) -> PlacementQuery:
        return PlacementQuery(
            generation_id=str(live.number),
            attempt=live.retries.attempts,
            model=self._model,
            prompt_tokens=len(live.asked.token_ids) + live.tokens,
            max_tokens=live.asked.max_tokens - live.tokens,
            block_hashes=live.hashes,
            avoid=live.retries.avoid,
            share=self._share(live),
            sparse=live.sparse,
        )

    def _share(self, live: Live) -> Share:
        return live.asked.share if self._fair else ONE_TENANT

    def _submit(self, live: Live, placement: Placement) -> None:
        worker = self._worker(placement.decode.worker_id)
        live.decode_id = placement.decode.worker_id
        live.prefill_id = None if placement.prefill is None else placement.prefill.worker_id
        attempt = live.retries.attempts
        try:
            if worker is None:
                raise NoWorker("the worker is gone")
            live.worker = worker
            live.job = worker.submit(
                self._submission(live, placement),
                lambda output: self._on_output(live, attempt, output),
                lambda error: self._on_lost(live, attempt, error),
            )
        except MeshError as error:
            self._on_lost(live, attempt, error)

    def _submission(self, live: Live, placement: Placement) -> Submission:
        asked = live.asked
        delivered = range(asked.output_tokens - 1, asked.output_tokens - 1 - live.tokens, -1)
        request = TokenRequest(
            request_id=str(live.number),
            token_ids=[*asked.token_ids, *delivered] if live.tokens else asked.token_ids,
            sampling=GREEDY,
            stop=StopConditions(asked.max_tokens - live.tokens),
            cache_salt=asked.share.tenant.encode(),
            share=self._share(live),
            attempt=live.retries.attempts,
            prompt_tokens=len(asked.token_ids),
            sparse=live.sparse,
        )
        return Submission(
            live.number,
            request,
            None,
            placement.prefill,
            placement.store,
            rank=placement.decode_rank,
            prefill_rank=placement.prefill_rank,
        )

    def _on_output(self, live: Live, attempt: int, output: Output) -> None:
        if attempt != live.retries.attempts or live.job is None:
            return
        if output.cached_tokens is not None and not live.tokens:
            live.cached_tokens, live.store_cached_tokens = output.cached_tokens, output.store_cached_tokens or 0
            live.host_cached_tokens = output.host_cached_tokens or 0
        if output.token_ids and (self._every_token or not live.tokens):
            live.record.tokens(self._timeline.now + self._call_seconds, len(output.token_ids))
        live.tokens = output.first_position + len(output.token_ids) - len(live.asked.token_ids)
        if output.finish is not None:
            self._report(live, AttemptOutcome.FINISHED)
            self._end(live, None)

    def _on_lost(self, live: Live, attempt: int, failure: MeshError) -> None:
        if attempt != live.retries.attempts:
            return
        outcome = attempt_outcome(failure)
        live.retries.note_failure(answered=live.tokens > 0)
        self._report(live, outcome)
        if outcome is AttemptOutcome.FAILED:
            self._end(live, failure)
            return
        live.replaced += 1
        live.retries.avoid |= {failure.metadata.get("worker_id", live.decode_id or "")}
        self._again(live, failure)

    def _again(self, live: Live, cause: MeshError) -> None:
        """Place once more after a pause, or give up."""
        try:
            pause = live.retries.pause_seconds(cause)
        except MeshError as error:
            self._end(live, error)
        else:
            self._timeline.after(pause, lambda: self._place(live, cause))

    def _report(self, live: Live, outcome: AttemptOutcome) -> None:
        live.job = None
        self._scheduler.report(AttemptReport(str(live.number), live.retries.attempts, outcome, live.tokens))

    def _end(self, live: Live, error: MeshError | None) -> None:
        self.live -= 1
        live.record.output_tokens = live.tokens
        live.record.cached_tokens = live.cached_tokens
        if error is not None:
            live.record.fail(error.reason, error.message)
        else:
            live.record.finished_s = self._timeline.now + self._call_seconds
            if not self._every_token:
                live.record.tokens(live.record.finished_s, max(0, live.tokens - 1))
        following = live.asked.ended(self._timeline.now) if live.asked.ended is not None and error is None else None
        live.forget_texts()
        self._on_end(live)
        if following is not None:
            self._expect(following)

    def _expect(self, asked: Asked) -> None:
        """A request that will arrive counts as live: the simulation must not end before it."""
        self.live += 1

        def arrive() -> None:
            self.live -= 1
            self.ask(asked)

        self._timeline.at(asked.seconds, arrive)

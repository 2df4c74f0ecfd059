"""A worker: its rank or ranks, and what its service adds: admission, calls to prefill workers, reports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from decode_svc import admission as decode_admission
from decode_svc.config import DecodeQueueConfig
from decode_svc.requests import finish_with, submit_of
from decode_svc.sessions import RequestBacklog
from engine.protocol.messages import Cancel, FirstToken, LandingOpened, Output, StepResult
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import Submission
from mesh.domain.shares import Census, Share
from mesh.domain.workers import WorkerIdentity
from mesh.errors import EngineFailed, MeshError, PrefillLost, WorkerDraining, rebuild
from prefill_svc import admission as prefill_admission
from prefill_svc.config import PrefillQueueConfig
from prefill_svc.jobs import PromptBacklog
from prefill_svc.prompts import Prompt
from sim.device import SimulatedDevice
from sim.job import Job, OnLost, OnOutput
from sim.lockstep import Lockstep
from sim.rank import SimulatedRank
from sim.remote_prompts import Calls, RemotePrompts
from sim.reports import StatusReporter
from sim.timeline import Timeline
from transfer.events import PushEnded


class MakeRanks(Protocol):
    """Makes new ranks with empty pools, for a process that starts."""

    def __call__(
        self,
        on_news: Callable[[object], None],
        on_result: Callable[[StepResult, int], None],
        on_quiet: Callable[[float], None],
    ) -> SimulatedRank | Lockstep: ...


@dataclass(slots=True)
class Tally:
    """What one worker did, over all its lives."""

    prompts: int = 0
    output_tokens: int = 0
    busy_seconds: float = 0.0
    lives: int = 0
    lived_seconds: float = 0.0
    refused: int = 0


class SimulatedWorker:
    """A decode or prefill worker, as its identity says. It lives from `start` until it dies or has drained."""

    def __init__(
        self,
        timeline: Timeline,
        identity: WorkerIdentity,
        make_ranks: MakeRanks,
        reporter: Callable[[WorkerIdentity, SimulatedRank | Lockstep], StatusReporter],
        on_stored: Callable[[StepResult], None],
        calls: Calls,
        decode_queue: DecodeQueueConfig,
        prefill_queue: PrefillQueueConfig,
    ) -> None:
        self.identity = identity
        self.tally = Tally()
        # One rank, or several that step together; None while the worker does not live.
        self.rank: SimulatedRank | Lockstep | None = None
        self.reports: StatusReporter | None = None
        self.draining = False
        self._timeline = timeline
        self._make_ranks = make_ranks
        self._reporter = reporter
        self._on_stored = on_stored
        self._remote_prompts = RemotePrompts(timeline, calls, self._take_first_token, self._lose_prompt)
        self._decode_queue = decode_queue
        self._prefill_queue = prefill_queue
        self._jobs: dict[int, Job] = {}
        # Jobs whose prompts' KV is pushed, by transfer id.
        self._pushes: dict[bytes, Job] = {}
        self._census = Census()
        self._keys = 0
        self._started_at = 0.0
        self._on_idle: Callable[[], None] | None = None

    @property
    def alive(self) -> bool:
        return self.rank is not None

    def start(self) -> None:
        """Start a new process with an empty pool."""
        assert self.rank is None
        self.tally.lives += 1
        self._started_at = self._timeline.now
        self.draining = False
        self.identity = _reincarnated(self.identity, self.tally.lives)
        self.rank = self._make_ranks(self._on_news, self._on_result, self._on_quiet)
        self.reports = self._reporter(self.identity, self.rank)

    def die(self) -> None:
        """End the process and lose all that it held. Whoever waits for one of its jobs is told that the job is lost."""
        if self.rank is not None:
            self.rank.catch_up()
            for key, tokens in self.rank.taken.items():
                job = self._jobs.get(key)
                if job is not None and tokens > (job.tokens or 0):
                    self._on_output(job, Output(key, tokens, []))
        jobs, self._jobs = self._jobs, {}
        self._pushes.clear()
        self._census = Census()
        self._end_process()
        for job in jobs.values():
            self._remote_prompts.drop(job)
            job.on_lost(EngineFailed(f"worker {self.identity.worker_id} died"))

    def drain(self, on_idle: Callable[[], None]) -> None:
        """Take no new requests. Once none is left the worker leaves the mesh, and `on_idle` is called."""
        self.draining, self._on_idle = True, on_idle
        assert self.reports is not None
        self.reports.drain()
        self._leave_if_idle()

    def freeze(self, seconds: float) -> None:
        """Make no progress for `seconds`, once the step under way is over."""
        assert self.rank is not None
        self.rank.freeze(seconds)

    # As a decode worker.

    def submit(self, submission: Submission, on_output: OnOutput, on_lost: OnLost) -> Job:
        """Raises MeshError if the worker does not take the request."""
        rank = self._takes()
        queued = sum(job.uncomputed_tokens for job in self._jobs.values())
        share = submission.request.share
        backlog = RequestBacklog(len(self._jobs), queued, 0, self._census.ahead(share))
        self._counted(
            lambda: decode_admission.admit(submission, backlog, self.identity.max_requests, self._decode_queue)
        )
        job = self._add(on_output, on_lost, share, submission.own_prefill_tokens)
        job.submission = submission
        rank.submit(submit_of(submission, job.key), submission.rank)
        return job

    # As a prefill worker.

    def compute(self, prompt: Prompt, on_output: OnOutput, on_lost: OnLost) -> Job:
        """Raises MeshError if the worker does not take the prompt."""
        rank = self._takes()
        queued = sum(job.uncomputed_tokens for job in self._jobs.values())
        share = prompt.request.share
        backlog = PromptBacklog(len(self._jobs), queued, self._census.ahead(share))
        self._counted(lambda: prefill_admission.admit(prompt, backlog, self.identity.max_requests, self._prefill_queue))
        job = self._add(on_output, on_lost, share, len(prompt.request.token_ids))
        job.ticket_id = prompt.ticket.transfer_id
        self._pushes[job.ticket_id] = job
        rank.submit(prompt.to_rank(job.key), prompt.rank)
        return job

    def cancel(self, job: Job) -> None:
        """Drop the job, whose tokens are no longer wanted."""
        if job.key in self._jobs:
            self._forget(job)
            if self.rank is not None:
                self.rank.send(Cancel(job.key))
        self._leave_if_idle()

    def _takes(self) -> SimulatedRank | Lockstep:
        if self.rank is None:
            raise EngineFailed(f"worker {self.identity.worker_id} is gone")
        if self.draining:
            raise WorkerDraining("this worker is draining: place the request on another")
        return self.rank

    def _counted(self, admit: Callable[[], None]) -> None:
        try:
            admit()
        except MeshError:
            self.tally.refused += 1
            raise

    def _add(self, on_output: OnOutput, on_lost: OnLost, share: Share, uncomputed_tokens: int) -> Job:
        job = Job(self._keys, on_output, on_lost, share, uncomputed_tokens=uncomputed_tokens)
        self._census.add(share)
        self._keys += 1
        self._jobs[job.key] = job
        return job

    def _on_result(self, result: StepResult, rank: int = 0) -> None:
        assert self.reports is not None and self.rank is not None
        self.reports.observe(result, rank, self.rank.statuses)
        if result.stored_blocks:
            self._on_stored(result)
        for output in result.outputs:
            job = self._jobs.get(output.key)
            if job is not None:
                self._on_output(job, output)
        self._leave_if_idle()

    def _on_quiet(self, ends: float) -> None:
        assert self.reports is not None
        self.reports.expect(ends)

    def _on_output(self, job: Job, output: Output) -> None:
        # Count by positions: quiet steps leave out outputs in between (see sim.quiet_steps).
        end = output.first_position + len(output.token_ids)
        self.tally.output_tokens += end - (output.first_position if job.tokens is None else job.tokens)
        job.tokens = end
        if output.cached_tokens is not None and job.uncomputed_tokens:
            self.tally.prompts += 1
            job.uncomputed_tokens = 0
        ends = output.finish is not None or output.refusal is not None
        job.drew = True
        # A prompt whose KV is pushed ends only once its push has ended too.
        if ends and (not job.ticket_id or job.pushed or output.refusal is not None):
            self._forget(job)
        if output.refusal is not None:
            job.on_lost(rebuild(output.refusal.reason, output.refusal.message))
        elif output.finish is not FinishReason.CANCELLED:
            job.on_output(output)

    def _on_news(self, news: object) -> None:
        if isinstance(news, LandingOpened):
            job = self._jobs.get(news.key)
            if job is not None:
                self._remote_prompts.begin(job, news)
        elif isinstance(news, PushEnded):
            self._on_push_ended(news)

    def _on_push_ended(self, ended: PushEnded) -> None:
        job = self._pushes.get(ended.transfer_id)
        if job is None:
            return
        job.pushed = True
        if ended.error is not None:
            self._forget(job)
            job.on_lost(PrefillLost(f"the KV was not pushed: {ended.error}"))
        elif job.drew:
            self._forget(job)
        self._leave_if_idle()

    def _take_first_token(self, job: Job, output: Output) -> None:
        """Take the first token that a prefill worker drew; its output carries that worker's own key."""
        assert job.submission is not None and self.rank is not None
        token_id, eos_token_ids = output.token_ids[0], SimulatedDevice.eos_token_ids
        finish = finish_with(token_id, job.submission.request.stop, eos_token_ids)
        self.rank.send(FirstToken(job.key, token_id) if finish is None else Cancel(job.key))
        self._on_output(job, msgspec.structs.replace(output, key=job.key, finish=finish))
        self._leave_if_idle()

    def _lose_prompt(self, job: Job, error: PrefillLost) -> None:
        if job.key in self._jobs:
            self.cancel(job)
            job.on_lost(error)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        self._census.remove(job.share)
        self._pushes.pop(job.ticket_id, None)
        self._remote_prompts.drop(job)

    def _leave_if_idle(self) -> None:
        if self.draining and not self._jobs and self._on_idle is not None and self.rank is not None:
            assert self.reports is not None
            self.reports.leave()
            self._end_process()
            on_idle, self._on_idle = self._on_idle, None
            on_idle()

    def settle(self) -> None:
        """Add to the tally what the present process has done so far."""
        if self.rank is not None:
            self.tally.busy_seconds += self.rank.drain_busy_seconds()
            self.tally.lived_seconds += self._timeline.now - self._started_at
            self._started_at = self._timeline.now

    def _end_process(self) -> None:
        self.settle()
        rank, self.rank = self.rank, None
        if rank is not None:
            rank.die()
        if self.reports is not None:
            self.reports.stop()
        self.reports = None


def _reincarnated(identity: WorkerIdentity, life: int) -> WorkerIdentity:
    return msgspec.structs.replace(identity, incarnation=str(life))

"""The prompts that prefill workers compute for a decode worker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.protocol.messages import LandingOpened, Output
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import StopConditions
from mesh.domain.workers import WorkerIdentity
from mesh.errors import MeshError, PrefillLost
from prefill_svc.prompts import Prompt
from sim.job import Job, OnLost, OnOutput
from sim.timeline import Timeline


class PrefillWorker(Protocol):
    """A worker that computes prompts for others."""

    identity: WorkerIdentity

    def compute(self, prompt: Prompt, on_output: OnOutput, on_lost: OnLost) -> Job: ...

    def cancel(self, job: Job) -> None: ...


# Seconds between two calls that a service makes. They do not arrive at once, so that a prefill worker without work
# begins with the first.
APART_SECONDS = 0.0002


@dataclass(frozen=True, slots=True)
class Calls:
    """How long a call from one worker to another takes, and which worker an id names."""

    seconds: float
    worker: Callable[[str], PrefillWorker | None]


@dataclass(slots=True, eq=False)
class _Call:
    worker: PrefillWorker
    # The prefill worker's job; None while the call is on its way.
    job: Job | None = None


class RemotePrompts:
    """Makes one call for each opened landing. `on_first_token` and `on_lost` are called for a job until its `drop`."""

    def __init__(
        self,
        timeline: Timeline,
        calls: Calls,
        on_first_token: Callable[[Job, Output], None],
        on_lost: Callable[[Job, PrefillLost], None],
    ) -> None:
        self._timeline = timeline
        self._calls = calls
        self._on_first_token = on_first_token
        self._on_lost = on_lost
        # Calls by the key of the decode worker's job.
        self._live: dict[int, _Call] = {}
        # From when on the service is free to make the next call.
        self._free_at = 0.0

    def begin(self, job: Job, opened: LandingOpened) -> None:
        """Have the prompt computed by the prefill worker that its placement names."""
        if job.submission is None or job.submission.prefill is None:
            return
        target = job.submission.prefill
        worker = self._calls.worker(target.worker_id)
        if worker is None or worker.identity.incarnation != target.incarnation:
            self._lose(job, target.worker_id, PrefillLost("it is gone"))
            return
        one_token = _with_one_token(job.submission.request)
        rank = job.submission.prefill_rank
        prompt = Prompt(one_token, opened.ticket, opened.held_blocks, job.submission.store, rank)
        call = self._live[job.key] = _Call(worker)
        leaves = max(self._timeline.now, self._free_at)
        self._free_at = leaves + APART_SECONDS
        self._timeline.at(leaves + self._calls.seconds, lambda: self._call(job, call, prompt))

    def drop(self, job: Job) -> None:
        """End the call for the job's prompt, if there is one."""
        call = self._live.pop(job.key, None)
        if call is None or call.job is None:
            return
        # The prefill worker's job refers to the call. Break this cycle: both are then freed without garbage collection.
        job_there, call.job = call.job, None
        if job_there.uncomputed_tokens:
            call.worker.cancel(job_there)

    def _call(self, job: Job, call: _Call, prompt: Prompt) -> None:
        if self._live.get(job.key) is not call:
            return

        def first_token(output: Output) -> None:
            if job.key in self._live and output.token_ids:
                self._on_first_token(job, output)

        def lost(error: MeshError) -> None:
            if job.key in self._live:
                self._lose(job, call.worker.identity.worker_id, error)

        try:
            call.job = call.worker.compute(prompt, first_token, lost)
        except MeshError as error:
            lost(error)

    def _lose(self, job: Job, worker_id: str, error: MeshError) -> None:
        self._on_lost(job, PrefillLost(error.message, metadata={"worker_id": worker_id}))


def _with_one_token(request: TokenRequest) -> TokenRequest:
    """The request as a prefill worker gets it, which ends after its first token."""
    return msgspec.structs.replace(request, stop=StopConditions(1))

"""Every prompt that this worker has, from acceptance until its call ends. Nothing is kept after that."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from engine.protocol.messages import StepResult, Submit
from mesh.domain.shares import Census, Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.errors import DeadlineExceeded, EngineFailed, InvalidRequest, MeshError
from prefill_svc.prompts import Job, Prompt
from transfer.events import PushEnded


class Ranks(Protocol):
    """Where prompts are computed. `submit` and `cancel` raise EngineFailed if a rank has died."""

    def new_key(
        self,
        token_ids: Sequence[int],
        cache_salt: bytes,
        computes_prompt: bool,
        sparse: SparsePrefill | None = None,
        booked: int | None = None,
    ) -> int:
        """A key for a prompt that will be submitted next; `computes_prompt` is True.

        booked: the rank on which the scheduler counts the prompt, if it says so.
        """
        ...

    def submit(self, submit: Submit) -> None: ...

    def cancel(self, key: int) -> None: ...


@dataclass(frozen=True, slots=True)
class PromptBacklog:
    """The load that admission considers."""

    live_prompts: int
    # Tokens of prompts that have no first token yet.
    queued_tokens: int
    # The fraction of waiting prompts that is served before one more prompt of the same tenant.
    ahead: float = 1.0


class Jobs:
    """`clock` is monotonic, in seconds."""

    def __init__(self, ranks: Ranks, clock: Callable[[], float]) -> None:
        # Set while no prompt is live.
        self.idle = asyncio.Event()
        self.idle.set()
        self._ranks = ranks
        self._clock = clock
        self._by_key: dict[int, Job] = {}
        self._by_transfer: dict[bytes, Job] = {}
        self._queued_tokens = 0
        self._census = Census()

    @property
    def live_prompts(self) -> int:
        return len(self._by_key)

    def backlog(self, share: Share) -> PromptBacklog:
        return PromptBacklog(len(self._by_key), self._queued_tokens, self._census.ahead(share))

    def submit(self, prompt: Prompt) -> Job:
        """Submit a prompt to a rank. Call `end` afterwards, whatever happens.

        Raises InvalidRequest if another prompt has the same ticket, EngineFailed if a rank has died.
        """
        if prompt.ticket.transfer_id in self._by_transfer:
            raise InvalidRequest("the ticket is in use: open another landing", field="ticket.transfer_id")
        wanted = prompt.request
        key = self._ranks.new_key(wanted.token_ids, wanted.cache_salt, True, wanted.sparse, booked=prompt.rank)
        self._ranks.submit(prompt.to_rank(key))
        job = Job(key, prompt, self._clock() + prompt.ticket.deadline_ms / 1000)
        self._by_key[key] = self._by_transfer[job.transfer_id] = job
        self._queued_tokens += len(prompt.request.token_ids)
        self._census.add(prompt.request.share)
        self.idle.clear()
        return job

    def end(self, job: Job) -> None:
        """The prompt's call is over: stop whatever its rank still does for it."""
        del self._by_key[job.key], self._by_transfer[job.transfer_id]
        self._census.remove(job.prompt.request.share)
        if not job.has_first_token:
            self._queued_tokens -= len(job.prompt.request.token_ids)
        if not self._by_key:
            self.idle.set()
        # If the rank has died, nothing runs.
        with suppress(EngineFailed):
            self._ranks.cancel(job.key)

    def on_step(self, result: StepResult) -> None:
        for output in result.outputs:
            job = self._by_key.get(output.key)
            # None if the call ended while the rank still had the prompt.
            if job is None:
                continue
            waited = not job.has_first_token
            job.on_output(output)
            if waited and job.has_first_token:
                self._queued_tokens -= len(job.prompt.request.token_ids)

    def on_push_ended(self, ended: PushEnded) -> None:
        job = self._by_transfer.get(ended.transfer_id)
        if job is not None:
            job.on_push_ended(ended)

    def fail_all(self, error: MeshError) -> None:
        for job in self._by_key.values():
            job.fail(error)

    def expire(self) -> None:
        """Fail prompts whose landing has passed its deadline. Call every few milliseconds."""
        now = self._clock()
        for job in self._by_key.values():
            if job.deadline <= now:
                job.fail(DeadlineExceeded("the landing's deadline passed before its KV was pushed"))

"""Prompts that prefill workers compute for requests of this one, from the opened landing to the last digest."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

from decode_svc.requests import PrefillTarget, Submission
from engine.messages import FirstToken, LandingOpened
from mesh.errors import EngineFailed, InvalidRequest, MeshError, PrefillLost
from mesh.metrics import DECODE_PREFILLS
from mesh.observe import span
from transfer.events import Granted
from transfer.ticket import SegmentDigest


class LandingRank(Protocol):
    """What the rank is told of landings. Both methods raise EngineFailed where it has gone."""

    def first_token(self, first: FirstToken) -> None: ...

    def pushed(self, digest: SegmentDigest) -> None: ...


@dataclass(slots=True, eq=False)
class RemotePrompt:
    """A request's prompt, and what the prefill worker may push of it."""

    submission: Submission
    target: PrefillTarget
    # Segments for which the rank has a staging slot, in the order in which they were granted.
    grants: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    # Both set once the landing is open.
    opened: LandingOpened | None = None
    task: asyncio.Task[PrefillLost | None] | None = None


class PrefillCalls(Protocol):
    """The way to prefill workers."""

    def follow(self, prompt: RemotePrompt) -> AsyncGenerator[FirstToken | SegmentDigest, None]:
        """Have the prompt computed, and pushed as it is granted; ends when all of it was pushed.

        Raises MeshError where the worker refuses, or is lost. Closing it ends the worker's part.
        """
        ...


class Prefills:
    """Keeps one call for each landing. `on_lost` gets the rank's key of a request whose prompt does not come."""

    def __init__(
        self,
        rank: LandingRank,
        calls: PrefillCalls,
        vocabulary_size: int,
        on_lost: Callable[[int, PrefillLost], None],
    ) -> None:
        self._rank = rank
        self._vocabulary_size = vocabulary_size
        self._calls = calls
        self._on_lost = on_lost
        # By the rank's key of the request.
        self._prompts: dict[int, RemotePrompt] = {}
        # Of open landings, by transfer id.
        self._open: dict[bytes, RemotePrompt] = {}

    @property
    def open_landings(self) -> int:
        """Those that a request waits for, or may still receive into."""
        return len(self._open)

    def expect(self, key: int, submission: Submission) -> None:
        """A request was submitted whose landing will open, unless the rank computes the prompt after all."""
        assert submission.prefill is not None
        self._prompts[key] = RemotePrompt(submission, submission.prefill)

    def on_opened(self, opened: LandingOpened) -> None:
        """Call the prefill worker. For a request that has ended, the messages crossed."""
        prompt = self._prompts.get(opened.key)
        if prompt is None:
            return
        assert prompt.opened is None
        prompt.opened = opened
        self._open[opened.ticket.transfer_id] = prompt
        prompt.task = asyncio.create_task(self._run(prompt, opened))
        prompt.task.add_done_callback(lambda task: self._end(opened.key, task))

    def on_granted(self, granted: Granted) -> None:
        prompt = self._open.get(granted.transfer_id)
        if prompt is not None:
            prompt.grants.put_nowait(granted.segment)

    def drop(self, key: int) -> None:
        """Nobody waits for this prompt any more; one that is not there is left alone."""
        prompt = self._prompts.pop(key, None)
        if prompt is None or prompt.opened is None:
            return
        del self._open[prompt.opened.ticket.transfer_id]
        assert prompt.task is not None
        prompt.task.cancel()

    def _end(self, key: int, task: asyncio.Task[PrefillLost | None]) -> None:
        if task.cancelled():
            DECODE_PREFILLS.labels("cancelled").inc()
            return
        lost = task.result()
        DECODE_PREFILLS.labels("done" if lost is None else "lost").inc()
        if lost is not None:
            self._on_lost(key, lost)

    async def _run(self, prompt: RemotePrompt, opened: LandingOpened) -> PrefillLost | None:
        """Returns why the prompt does not come."""
        submission, seconds = prompt.submission, opened.ticket.deadline_ms / 1000
        try:
            with span("decode.prefill", request_id=submission.request_id, worker_id=prompt.target.worker_id):
                async with asyncio.timeout(seconds):
                    await self._relay(prompt, opened)
        except TimeoutError:
            return prompt.target.lost(f"the KV did not come within {seconds:g} s")
        except MeshError as error:
            return prompt.target.lost(error.message)
        return None

    async def _relay(self, prompt: RemotePrompt, opened: LandingOpened) -> None:
        """Tell the rank what the prefill worker says. Raises MeshError."""
        resumes = False
        async with aclosing(self._calls.follow(prompt)) as events:
            async for event in events:
                self._check(event, prompt, opened)
                resumes = resumes or isinstance(event, FirstToken)
                # Where our rank has gone every request hears of it.
                with suppress(EngineFailed):
                    self._tell_rank(event)
        if not resumes:
            raise InvalidRequest("it ended without a first token")

    def _tell_rank(self, event: FirstToken | SegmentDigest) -> None:
        if isinstance(event, FirstToken):
            self._rank.first_token(event)
        else:
            self._rank.pushed(event)

    def _check(self, event: FirstToken | SegmentDigest, prompt: RemotePrompt, opened: LandingOpened) -> None:
        """Raises InvalidRequest for what is not of this prompt, or would be too much for a rank."""
        if isinstance(event, SegmentDigest):
            if event.transfer_id != opened.ticket.transfer_id:
                raise InvalidRequest("it sent the digest of another transfer")
            return
        if event.token_id >= self._vocabulary_size:
            raise InvalidRequest(f"it sent token {event.token_id}, and the vocabulary has {self._vocabulary_size}")
        if prompt.submission.sampling.top_logprobs is not None and event.logprobs is None:
            raise InvalidRequest("it sent a first token without its log probabilities")

"""Remote prefills: prompts that prefill workers compute for this worker, from the opened landing to the end of the
call.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from decode_svc.requests import finish_with, prefill_lost
from engine.protocol.messages import LandingOpened, Output, Ready
from mesh.domain.outputs import PromptLogprobs
from mesh.domain.requests import Submission, TokenRequest
from mesh.domain.targets import WorkerTarget
from mesh.errors import InvalidConstraint, InvalidRequest, MeshError
from mesh.observe.metrics import DECODE_PREFILLS
from mesh.observe.spans import request_id, span
from mesh.observe.tracing import TraceContext, trace_context

_log = logging.getLogger("deepmesh.decode")


@dataclass(slots=True)
class _RemotePrompt:
    submission: Submission
    target: WorkerTarget
    # Set once the landing is open.
    call: asyncio.Task[MeshError | None] | None = None
    # Whether the registry listed the target at the last check. The listing may arrive a moment after the prompt.
    known: bool = False


class PrefillCalls(Protocol):
    """Calls to prefill workers."""

    def call(self, target: WorkerTarget, submission: Submission, opened: LandingOpened) -> AsyncGenerator[Output, None]:
        """Have the prompt computed and its KV pushed into the landing; ends once all of the KV was pushed.

        Yields the first token as soon as it is drawn, as the rank would report it, but without the request's end.

        Raises MeshError if the worker refuses or is lost. Closing the generator cancels the call.
        """
        ...

    def knows(self, target: WorkerTarget) -> bool:
        """Whether a scheduler has listed that worker within the last lease."""
        ...


class Prefills:
    """Keeps one call for each landing.

    `on_first_token` gets a request's first token while its KV is still on the way. `on_lost` gets the rank's key of a
    request whose prompt will not arrive, unless its KV has landed already, and the reason: PrefillLost if another
    prefill worker may do better, InvalidConstraint if none can, a plain MeshError if the call failed through a mistake
    of this service.
    """

    def __init__(
        self,
        calls: PrefillCalls,
        ready: Ready,
        on_first_token: Callable[[Output], None],
        on_lost: Callable[[int, MeshError], None],
    ) -> None:
        """ready: the description that the receiving rank sent of itself."""
        self._vocabulary_size = ready.vocabulary_size
        self._eos_token_ids = ready.eos_token_ids
        self._calls = calls
        self._on_first_token = on_first_token
        self._on_lost = on_lost
        # By the rank's key of the request.
        self._prompts: dict[int, _RemotePrompt] = {}

    @property
    def open_landings(self) -> int:
        """Landings that a request waits for, or that may still receive KV."""
        return sum(prompt.call is not None for prompt in self._prompts.values())

    def expect(self, key: int, submission: Submission) -> None:
        """A request was submitted; its landing will open unless the rank computes the prompt after all."""
        assert submission.prefill is not None
        self._prompts[key] = _RemotePrompt(submission, submission.prefill)

    def on_opened(self, opened: LandingOpened) -> None:
        """Call the prefill worker, unless the request has ended meanwhile."""
        prompt = self._prompts.get(opened.key)
        if prompt is None:
            return
        assert prompt.call is None
        prompt.call = asyncio.create_task(self._run(prompt.target, prompt.submission, opened))
        prompt.call.add_done_callback(lambda call: self._end(opened.key, call))

    def on_tick(self) -> None:
        """End prompts of workers that disappeared silently: a proxy in between may still answer our pings.

        This also covers calls that are over, as long as their KV has not landed: the KV may be stuck at the far end of
        a network that has failed.
        """
        for key, prompt in list(self._prompts.items()):
            if prompt.call is None:
                continue
            known, prompt.known = prompt.known, self._calls.knows(prompt.target)
            if known and not prompt.known:
                self._end_early(key, "lost")
                self._on_lost(key, prefill_lost(prompt.target, "no scheduler has listed it for a lease"))

    def drop(self, key: int) -> None:
        """End this prompt's call, if there is one: its request has ended."""
        self._end_early(key, "cancelled")

    def _end_early(self, key: int, outcome: str) -> None:
        prompt = self._prompts.pop(key, None)
        # A call that is over has been counted already.
        if prompt is not None and prompt.call is not None and prompt.call.cancel():
            DECODE_PREFILLS.labels(outcome).inc()

    def _end(self, key: int, call: asyncio.Task[MeshError | None]) -> None:
        """The call is over. An exception raised here would reach no caller, and the request would wait until its
        deadline.
        """
        if call.cancelled():
            return
        lost: MeshError | None
        if (mistake := call.exception()) is None:
            lost = call.result()
        else:
            _log.error("prefill call failed", exc_info=mistake)
            lost = MeshError("internal error: the prefill call failed")
        DECODE_PREFILLS.labels("done" if lost is None else "lost").inc()
        if lost is not None:
            self._on_lost(key, lost)

    async def _run(self, target: WorkerTarget, submission: Submission, opened: LandingOpened) -> MeshError | None:
        """Make the call. Returns why the prompt does not arrive; None if all of its KV was pushed."""
        # This task was started by a message of the rank, so it must set its own context.
        request_id.set(submission.request.request_id)
        trace_context.set(TraceContext.parse(submission.request.traceparent))
        seconds = opened.ticket.deadline_ms / 1000
        try:
            with span("decode.prefill", worker_id=target.worker_id):
                async with (
                    asyncio.timeout(seconds),
                    aclosing(self._calls.call(target, submission, opened)) as first_tokens,
                ):
                    await self._relay(first_tokens, submission)
        except TimeoutError:
            return prefill_lost(target, f"the KV did not come within {seconds:g} s")
        except InvalidConstraint as error:
            # Only a rank compiles grammars, and every rank would refuse this one.
            return error
        except MeshError as error:
            return prefill_lost(target, error.message)
        return None

    async def _relay(self, first_tokens: AsyncGenerator[Output, None], submission: Submission) -> None:
        """Pass on the one first token that the prefill worker sends. Raises MeshError."""
        drawn = False
        async for first in first_tokens:
            if drawn:
                raise InvalidRequest("it sent a second first token")
            self._check(first, submission)
            drawn = True
            first.finish = finish_with(first.token_ids[0], submission.request.stop, self._eos_token_ids)
            self._on_first_token(first)
        if not drawn:
            raise InvalidRequest("it ended without a first token")

    def _check(self, first: Output, submission: Submission) -> None:
        """Raises InvalidRequest for a first token that is impossible for this prompt: the rank or the gateway would
        fail on it.
        """
        (token_id,) = first.token_ids
        if token_id >= self._vocabulary_size:
            raise InvalidRequest(f"it sent token {token_id}, and the vocabulary has {self._vocabulary_size}")
        if (first.cached_tokens or 0) > len(submission.request.token_ids):
            raise InvalidRequest(f"it found {first.cached_tokens} tokens cached of {len(submission.request.token_ids)}")
        top_logprobs = submission.request.sampling.top_logprobs
        asked = None if top_logprobs is None else min(top_logprobs, self._vocabulary_size)
        given = None if first.logprobs is None else len(first.logprobs[0].top_token_ids)
        if given != asked:
            raise InvalidRequest("it sent a first token with other log probabilities than were asked for")
        if not _fits(first.prompt_logprobs, submission.request):
            raise InvalidRequest("it sent other log probabilities of the prompt than were asked for")


def _fits(found: PromptLogprobs | None, request: TokenRequest) -> bool:
    """Whether `found` is what the request wants: the log probabilities of its prompt, or None if it wants none."""
    tokens = len(request.token_ids)
    delivered = request.prompt_tokens is not None and request.prompt_tokens < tokens
    if request.sampling.prompt_logprobs is None or delivered:
        return found is None
    return found is not None and found.fits and len(found.logprobs) == 4 * (tokens - 1)

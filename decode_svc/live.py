"""The requests that the ranks have, by key."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from decode_svc.requests import Request, submit_of
from decode_svc.session import GatewaySession
from engine.protocol.messages import FirstToken, Output, Submit
from mesh.domain.requests import Submission
from mesh.domain.shares import Census
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.errors import EngineFailed
from mesh.observe.spans import span
from mesh.observe.tracing import TraceContext


class Ranks(Protocol):
    """Where requests run. Methods that send raise EngineFailed if a rank has died."""

    def new_key(
        self,
        token_ids: Sequence[int],
        cache_salt: bytes,
        computes_prompt: bool,
        sparse: SparsePrefill | None = None,
        booked: int | None = None,
    ) -> int:
        """A key for a request that will be submitted next. `computes_prompt` is False if another worker computes its
        prompt.

        booked: the rank on which the scheduler counts the request, if it says so.
        """
        ...

    def submit(self, submit: Submit) -> None: ...

    def cancel(self, key: int) -> None: ...

    def first_token(self, first: FirstToken) -> None: ...


class RemotePrompts(Protocol):
    """Prompts that prefill workers compute, by the key of their request."""

    def expect(self, key: int, submission: Submission) -> None:
        """Announce that the request's landing will open."""
        ...

    def drop(self, key: int) -> None:
        """The prompt is no longer wanted. An unknown key is ignored."""
        ...


@dataclass(frozen=True, slots=True)
class Live:
    """A request that a rank has."""

    session: GatewaySession
    request: Request
    # In seconds on the owner's clock; None if there is no deadline.
    deadline: float | None
    # Span from acceptance to end.
    life: span


class LiveRequests:
    """Sets the `key` of each request while a rank has it. `clock` is monotonic, in seconds."""

    def __init__(self, ranks: Ranks, prompts: RemotePrompts, clock: Callable[[], float]) -> None:
        # Set while no request is live.
        self.idle = asyncio.Event()
        self.idle.set()
        # Prompt tokens that this worker must compute, over requests that have no first token yet.
        self.queued_prefill_tokens = 0
        self._ranks = ranks
        self._prompts = prompts
        self._clock = clock
        self._by_key: dict[int, Live] = {}
        self.census = Census()

    def __len__(self) -> int:
        return len(self._by_key)

    def submit(self, session: GatewaySession, request: Request, submission: Submission) -> None:
        """Submit a request to a rank. Raises EngineFailed if a rank has died."""
        life, submission = _begin(submission)
        wanted = submission.request
        computes_prompt = submission.prefill is None
        key = self._ranks.new_key(
            wanted.token_ids, wanted.cache_salt, computes_prompt, wanted.sparse, booked=submission.rank
        )
        self._ranks.submit(submit_of(submission, key))
        request.key = key
        self.census.add(request.share)
        deadline = None if submission.deadline_ms is None else self._clock() + submission.deadline_ms / 1000
        self._by_key[key] = Live(session, request, deadline, life)
        self.idle.clear()
        self.queued_prefill_tokens += request.own_prefill_tokens
        if submission.prefill is not None:
            self._prompts.expect(key, submission)

    def get(self, key: int) -> Live | None:
        """None if the request was ended here while its rank still had it."""
        return self._by_key.get(key)

    def all(self) -> list[Live]:
        return list(self._by_key.values())

    def overdue(self) -> list[Live]:
        """The requests whose deadline has passed."""
        now = self._clock()
        return [live for live in self._by_key.values() if live.deadline is not None and live.deadline <= now]

    def prompt_computed(self, request: Request) -> None:
        """Note that the request's first token has arrived."""
        self.queued_prefill_tokens -= request.own_prefill_tokens

    def go_on(self, first: Output) -> None:
        """A prefill worker drew the first token: have the rank continue after it, or forget the request if it ends
        there.
        """
        # If the rank has died, every request ends with that error anyway.
        with suppress(EngineFailed):
            if first.finish is None:
                self._ranks.first_token(FirstToken(first.key, first.token_ids[0], first.drafts_end))
            else:
                self._ranks.cancel(first.key)

    def cancel(self, request: Request) -> None:
        """Have the rank end the request. If no rank has it (any more), nothing happens: the messages crossed."""
        if request.key is not None:
            # If the rank has died, nothing runs.
            with suppress(EngineFailed):
                self._ranks.cancel(request.key)

    def release(self, request: Request) -> None:
        """Forget a request; further output of its rank for it is dropped."""
        if request.key is None:
            return
        self.census.remove(request.share)
        self._by_key.pop(request.key).life.end(output_tokens=len(request.token_ids))
        self._prompts.drop(request.key)
        request.key = None
        if not request.token_ids:
            self.queued_prefill_tokens -= request.own_prefill_tokens
        if not self._by_key:
            self.idle.set()


def _begin(submission: Submission) -> tuple[span, Submission]:
    """Begins the span of a request's life here. Returns it, and the submission with that span as its parent."""
    request = submission.request
    life = span("decode.request", request_id=request.request_id, attempt=request.attempt)
    life.begin(TraceContext.parse(request.traceparent))
    if life.context is None:
        return life, submission
    return life, replace(submission, request=replace(request, traceparent=life.context.traceparent))

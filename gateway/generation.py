"""One live request: its token log, its text, and the tokens that its client has not read yet."""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gateway.prepared import Prepared
from gateway.rounds import CallAt, Wakeup
from gateway.text.delta import Delta, Finish, ScoredPrompt, Usage
from gateway.text.transcript import Passage
from mesh.domain.outputs import CachedTokens, FinishReason, Logprobs, PromptLogprobs
from mesh.domain.requests import TokenRequest
from mesh.errors import InvalidConstraint, InvalidRequest, MeshError, SlowClient
from mesh.observe.metrics import GATEWAY_ITL_SECONDS
from mesh.observe.tracing import current_traceparent

# Name of the request field in which a client says how many tokens it has.
POSITION_FIELD = "position"


class Generation:
    """Written by the worker's link (`receive`, `finish`, `fail`, `doubt`), read by its client's task.

    `interrupt` interrupts the client's task, whatever it waits for.

    Tokens received are never retracted: a continuation on another worker begins at `next_position`.
    """

    def __init__(self, prepared: Prepared, deadline: float, unread_limit: int, interrupt: Callable[[], None]) -> None:
        self.prepared = prepared
        self.model = prepared.model
        self.request = prepared.request
        # On the event loop's clock, in seconds.
        self.deadline = deadline
        self.cached = CachedTokens()
        # Whether some tokens were accepted in place of others that the seed gives.
        self.relaxed = False
        # Whether the prompt's log probabilities were asked for and have not arrived yet.
        self.awaits_prompt = prepared.request.sampling.prompt_logprobs is not None
        # Why the client was dropped; None while it is served.
        self.given_up: MeshError | None = None
        # How often the client's task has asked for tokens; the count stands still if the client is stuck.
        self.reads = 0
        # Parent of the spans of this request's workers.
        self._traceparent = current_traceparent()
        self._transcript = prepared.new_transcript()
        self._echo = prepared.echo
        self._unread_limit = unread_limit
        self._interrupt = interrupt
        self._prompt_tokens = len(prepared.request.token_ids)
        self._received = array("I")
        self._logprobs: list[Logprobs] = []
        # The prompt's log probabilities, until the client has read them.
        self._prompt: ScoredPrompt | None = None
        self._read = 0
        self._reason: FinishReason | None = None
        self._failure: MeshError | None = None
        self._doubted = False
        self._wakeup = Wakeup()
        self._gaps = GATEWAY_ITL_SECONDS.labels(prepared.model)
        self._received_at: float | None = None
        # Tokens that the client already has from an earlier call.
        self._delivered = 0
        # Tokens that earlier calls for this answer had received.
        self._inherited = 0
        if prepared.history is not None:
            self._received.extend(prepared.history.received)
            self._inherited, self.relaxed = len(self._received), prepared.history.relaxed
            self._reason, self._delivered = prepared.history.reason, prepared.history.delivered

    @property
    def next_position(self) -> int:
        """Position of the first token not received, counted from the prompt's first."""
        return self._prompt_tokens + len(self._received)

    @property
    def received_tokens(self) -> int:
        return len(self._received)

    @property
    def generated_tokens(self) -> int:
        """Tokens received by this call, without those that earlier calls had received."""
        return len(self._received) - self._inherited

    @property
    def unread_tokens(self) -> int:
        return len(self._received) - self._read

    @property
    def awaited(self) -> bool:
        """Whether the client's task waits for tokens; if not, it waits for its client."""
        return self._wakeup.awaited

    @property
    def remaining_tokens(self) -> int:
        return self.request.stop.max_tokens - len(self._received)

    def continuation(self, attempt: int) -> TokenRequest:
        """The request for what is left to generate, after the prompt and the tokens received."""
        return replace(
            self.request,
            token_ids=array("I", self.request.token_ids) + self._received,
            stop=replace(self.request.stop, max_tokens=self.remaining_tokens),
            attempt=attempt,
            prompt_tokens=self._prompt_tokens,
            traceparent=self._traceparent,
        )

    def receive_prompt(self, logprobs: PromptLogprobs) -> None:
        """Take the log probabilities of the prompt's tokens. They arrive before the answer's first token."""
        if not logprobs.fits or len(logprobs.logprobs) != 4 * (self._prompt_tokens - 1):
            self.fail(MeshError("the worker sent log probabilities of another prompt"))
            return
        self._prompt = ScoredPrompt(self.request.token_ids, logprobs)
        self.awaits_prompt = False

    def receive(
        self,
        first_position: int,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs] = (),
        cached: CachedTokens | None = None,
        relaxed: bool = False,
    ) -> None:
        """Append tokens and drop those already received. A gap is a bug in the mesh and fails the generation."""
        received = self._received
        ahead = first_position - self._prompt_tokens - len(received)
        if ahead > 0:
            self.fail(MeshError(f"the worker skipped {ahead} tokens at position {self.next_position}"))
            return
        if ahead < 0:
            token_ids, logprobs = token_ids[-ahead:], logprobs[-ahead:]
        if cached is not None and not received:
            self.cached = cached
        self.relaxed |= relaxed
        if token_ids:
            self._note_arrival()
            received.extend(token_ids)
        if logprobs:
            self._logprobs.extend(logprobs)
        # Inherited tokens do not count as unread: they arrived all at once, before this client could read any.
        if len(received) - max(self._read, self._inherited) > self._unread_limit:
            self.give_up(SlowClient(f"the client left more than {self._unread_limit} tokens unread: read faster"))
        self._wakeup.when_due()

    @property
    def ended(self) -> bool:
        """Whether a worker said how the generation ended."""
        return self._reason is not None

    def begin_attempt(self) -> None:
        """Another worker is about to be asked: forget how the attempt before it failed."""
        self._failure, self._doubted = None, False

    def doubt(self) -> None:
        """The attempt's worker cannot be reached, though it may be alive. LiveGeneration looks for another one."""
        if self._reason is None:
            self._doubted = True
            self._wakeup.now()

    def _note_arrival(self) -> None:
        now = time.monotonic()
        if self._received_at is not None:
            self._gaps.observe(now - self._received_at)
        self._received_at = now

    def finish(self, reason: FinishReason) -> None:
        """Called once the worker has ended the generation and all of its tokens were received."""
        if self._reason is None and self._failure is None:
            self._reason = reason
            self._wakeup.now()

    def fail(self, failure: MeshError) -> None:
        """Note that the attempt failed; LiveGeneration decides whether another one follows."""
        if isinstance(failure, InvalidConstraint):
            # Workers do not know the client's name of the field.
            failure = InvalidConstraint(failure.message, field=self.prepared.form_field)
        if self._reason is None and self._failure is None:
            self._failure = failure
            self._wakeup.now()

    def give_up(self, reason: MeshError) -> None:
        """End the generation and interrupt the client's task, which may be stuck in a write."""
        self.given_up = self.given_up or reason
        self._interrupt()

    async def readable(self, due: float = 0.0, call_at: CallAt | None = None) -> None:
        """Return once there are tokens to read and it is `due` on the event loop's clock, or after an end or a doubt.

        It may also return early. call_at: by default the event loop's.
        """
        if self._doubted or self._reason is not None or self._failure is not None:
            return
        unread = self._read < len(self._received)
        if unread and asyncio.get_running_loop().time() >= due:
            return
        await self._wakeup.sleep(due, call_at, timed=unread)

    def pop_failure(self) -> MeshError | None:
        """The failure of the last attempt. Returns it once, and only after all received tokens were drained."""
        if self._read < len(self._received):
            return None
        failure, self._failure = self._failure, None
        return failure

    def pop_doubt(self) -> bool:
        """Whether `doubt` was called since this was last asked."""
        doubted, self._doubted = self._doubted, False
        return doubted

    def drain(self) -> Delta:
        """Everything unread. The last delta has `finish`; do not call `drain` again after it.

        Raises InvalidRequest if the answer has fewer tokens than its client says it has.
        """
        self.reads += 1
        stop_token_id = self._received[-1] if self._received and self._reason is FinishReason.STOP else None
        # The token with which the model stops ends the answer but is not part of its text.
        text_end = len(self._received) - (stop_token_id is not None)
        if self._read < self._delivered:
            # Rebuild the text that the client has, so that the new text continues it.
            had = self._transcript.push(self._received[self._read : min(self._delivered, text_end)])
            if had.match is not None:
                # The client has the whole answer: any further tokens of the worker follow a stop string.
                self._read += had.tokens
                self._check_delivered(self._read)
                return Delta([], "", "", finish=self._finish(FinishReason.STOP, had.match.string), position=self._read)
            if self._reason is not None:
                self._check_delivered(len(self._received))
            self._read = min(self._delivered, len(self._received))
        token_ids = self._received[self._read :]
        logprobs, self._logprobs = self._logprobs, []
        passage = self._transcript.push(self._received[self._read : max(self._read, text_end)])
        if passage.match is not None:
            del token_ids[passage.tokens :], logprobs[passage.tokens :]
        self._read += len(token_ids)
        delta = Delta(token_ids, self._echo + passage.content, passage.reasoning, logprobs, passage.calls)
        delta.position = self._read
        self._echo = ""
        delta.prompt, self._prompt = self._prompt, None
        if passage.match is not None:
            delta.finish = self._finish(FinishReason.STOP, passage.match.string)
        elif self._reason is not None:
            self._close(delta, self._reason, stop_token_id)
        return delta

    def _check_delivered(self, tokens: int) -> None:
        """tokens: the length of the whole answer."""
        if self._delivered > tokens:
            message = f"the answer ended with token {tokens}, and {self._delivered} were said to be there already"
            raise InvalidRequest(message, field=POSITION_FIELD)

    def _close(self, delta: Delta, reason: FinishReason, stop_token_id: int | None) -> None:
        passage: Passage = self._transcript.finish()
        delta.content += passage.content
        delta.reasoning += passage.reasoning
        delta.calls += passage.calls
        string = passage.match.string if passage.match is not None else None
        delta.finish = self._finish(reason, string, stop_token_id)

    def _finish(self, reason: FinishReason, stop_string: str | None, stop_token_id: int | None = None) -> Finish:
        return Finish(reason, self.usage, stop_string, stop_token_id, self._transcript.calls > 0, self.relaxed)

    @property
    def usage(self) -> Usage:
        """Token counts up to what was drained."""
        return Usage(self._prompt_tokens, self._read, self.cached, self._transcript.reasoning_tokens)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in a cache."""
        return self.cached.tokens

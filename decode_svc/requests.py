"""One request of a gateway, and what of its output the gateway may still ask for."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.protocol.messages import Output, Submit
from mesh.domain.outputs import FinishReason, Logprobs
from mesh.domain.requests import Submission
from mesh.domain.targets import WorkerTarget
from mesh.errors import MeshError, PrefillLost, rebuild

Terminal = FinishReason | MeshError


class OutputSlice(NamedTuple):
    """What a frame says of one request: tokens from `first_position` on, and its end where that is reached."""

    stream_id: int
    attempt: int
    # Of token_ids[0], prompt included.
    first_position: int
    token_ids: Sequence[int]
    # One for each token where asked for.
    logprobs: Sequence[Logprobs]
    # With the first token: prompt tokens that were not computed again.
    cached_tokens: int | None
    terminal: Terminal | None


@dataclass(slots=True)
class Request:
    """A request's output from its first token on, kept until the gateway acknowledges its end."""

    stream_id: int
    attempt: int
    prompt_tokens: int
    # Of the prompt, what this worker computes.
    own_prefill_tokens: int = 0
    # Who computes it, where this worker does not.
    prefill: WorkerTarget | None = None
    # What one token of it takes to keep and to send, relative to a plain token.
    token_weight: int = 1
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[Logprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    terminal: Terminal | None = None
    # The rank's name for it; None where the rank does not have it (any more). Written by LiveRequests.
    key: int | None = None
    # Tokens that frames of the current stream hold, and whether the end is among them.
    sent: int = 0
    sent_terminal: bool = False

    @property
    def next_position(self) -> int:
        """Position of the token that comes next."""
        return self.prompt_tokens + len(self.token_ids)

    @property
    def kept_tokens(self) -> int:
        """What its history takes, in plain tokens."""
        return len(self.token_ids) * self.token_weight

    @property
    def has_unsent(self) -> bool:
        return self.sent < len(self.token_ids) or (self.terminal is not None and not self.sent_terminal)

    def append(self, output: Output) -> None:
        """Keep what a step brought."""
        assert self.terminal is None
        assert not output.token_ids or output.first_position == self.next_position
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens

    def rewind(self, position: int) -> bool:
        """Start sending again at `position`; False where no token of ours can come next there."""
        sent = position - self.prompt_tokens
        if not 0 <= sent <= len(self.token_ids):
            return False
        self.sent = sent
        self.sent_terminal = False
        return True

    def take(self, most_tokens: int) -> OutputSlice:
        """The next unsent tokens, and the end with the last of them."""
        start, end = self.sent, min(self.sent + most_tokens, len(self.token_ids))
        self.sent = end
        terminal = self.terminal if end == len(self.token_ids) else None
        self.sent_terminal = terminal is not None
        return OutputSlice(
            self.stream_id,
            self.attempt,
            self.prompt_tokens + start,
            self.token_ids[start:end],
            self.logprobs[start:end],
            self.cached_tokens if start == 0 < end else None,
            terminal,
        )


def submit_of(submission: Submission, key: int) -> Submit:
    """The request as the rank takes it, under the name that it has there."""
    prefill = submission.prefill
    return Submit(
        key=key,
        request=submission.request,
        lands=prefill is not None,
        sender_slot_bytes=None if prefill is None else prefill.slot_bytes,
        fetch=submission.store if prefill is None else None,
    )


def make_request(submission: Submission) -> Request:
    """An empty history for a submission."""
    alternatives = submission.request.sampling.top_logprobs
    weight = 1 if alternatives is None else 2 + 2 * alternatives
    return Request(
        stream_id=submission.stream_id,
        attempt=submission.request.attempt,
        prompt_tokens=len(submission.request.token_ids),
        own_prefill_tokens=submission.own_prefill_tokens,
        prefill=submission.prefill,
        token_weight=weight,
    )


def prefill_lost(target: WorkerTarget, message: str) -> PrefillLost:
    """The error of a request whose prompt did not come from there."""
    return PrefillLost(f"prefill worker {target.worker_id}: {message}", metadata={"worker_id": target.worker_id})


def terminal_of(request: Request, output: Output) -> Terminal | None:
    """How the rank says that the request ended; None where it goes on."""
    if output.refusal is None:
        return output.finish
    reason, message = output.refusal.reason, output.refusal.message
    if reason == PrefillLost.reason and request.prefill is not None:
        return prefill_lost(request.prefill, message)
    return rebuild(reason, message)

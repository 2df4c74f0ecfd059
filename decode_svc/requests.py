"""One request of a gateway, with the output that the gateway may still ask for."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.protocol.messages import Output, Submit
from mesh.domain.outputs import CachedTokens, FinishReason, Logprobs, PromptLogprobs
from mesh.domain.requests import Submission
from mesh.domain.sampling import StopConditions
from mesh.domain.shares import ONE_TENANT, Share
from mesh.domain.targets import WorkerTarget
from mesh.errors import MeshError, PrefillLost, rebuild

Terminal = FinishReason | MeshError


class OutputSlice(NamedTuple):
    """One request's part of a frame: tokens from `first_position` on, and the request's end if they reach it."""

    stream_id: int
    attempt: int
    # Position of token_ids[0], counted from the prompt's first token.
    first_position: int
    token_ids: Sequence[int]
    # One entry for each token if the request asked for them.
    logprobs: Sequence[Logprobs]
    # Set with the first token: prompt tokens that were found in a cache.
    cached: CachedTokens | None
    terminal: Terminal | None
    # Whether some tokens so far were accepted in place of others that were drawn.
    relaxed: bool = False
    # Set with the first token if the request asked for them: the prompt's own log probabilities.
    prompt_logprobs: PromptLogprobs | None = None

    def weight(self, token_weight: int) -> int:
        """The cost of sending it, in tokens without log probabilities."""
        prompt = 0 if self.prompt_logprobs is None else self.prompt_logprobs.values
        return 1 + len(self.token_ids) * token_weight + prompt


@dataclass(slots=True)
class Request:
    """A request's output from its first token on, kept until the gateway acknowledges its end."""

    stream_id: int
    attempt: int
    prompt_tokens: int
    # Prompt tokens that this worker computes.
    own_prefill_tokens: int = 0
    share: Share = ONE_TENANT
    # The worker that computes the prompt, if not this one.
    prefill: WorkerTarget | None = None
    # The cost of keeping and sending one token of the request, relative to a token without log probabilities.
    token_weight: int = 1
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[Logprobs] = field(default_factory=list)
    cached: CachedTokens | None = None
    prompt_logprobs: PromptLogprobs | None = None
    terminal: Terminal | None = None
    # Whether some tokens were accepted in place of others that were drawn.
    relaxed: bool = False
    # Names the request between service and rank; None if no rank has it (any more). Written by LiveRequests.
    key: int | None = None
    # How many tokens the current stream's frames have taken, and whether they have taken the end.
    sent: int = 0
    sent_terminal: bool = False

    @property
    def next_position(self) -> int:
        """Position of the next token."""
        return self.prompt_tokens + len(self.token_ids)

    @property
    def kept_tokens(self) -> int:
        """Size of the history, in tokens without log probabilities."""
        prompt = 0 if self.prompt_logprobs is None else self.prompt_logprobs.values
        return len(self.token_ids) * self.token_weight + prompt

    @property
    def has_unsent(self) -> bool:
        return self.sent < len(self.token_ids) or (self.terminal is not None and not self.sent_terminal)

    def append(self, output: Output) -> None:
        """Keep the output of one step."""
        assert self.terminal is None
        assert not output.token_ids or output.first_position == self.next_position
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        if output.cached_tokens is not None:
            host, stored = output.host_cached_tokens or 0, output.store_cached_tokens or 0
            self.cached = CachedTokens(output.cached_tokens, host, stored)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.relaxed |= output.relaxed

    def rewind(self, position: int) -> bool:
        """Send again from `position` on. False if the history has no such position."""
        sent = position - self.prompt_tokens
        if not 0 <= sent <= len(self.token_ids):
            return False
        self.sent = sent
        self.sent_terminal = False
        return True

    def next_slice(self, most_tokens: int) -> OutputSlice:
        """The next unsent tokens, which count as sent from now on; the last of them are sent with the end."""
        start, end = self.sent, min(self.sent + most_tokens, len(self.token_ids))
        self.sent = end
        terminal = self.terminal if end == len(self.token_ids) else None
        self.sent_terminal = terminal is not None
        return OutputSlice(
            stream_id=self.stream_id,
            attempt=self.attempt,
            first_position=self.prompt_tokens + start,
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            cached=self.cached if start == 0 < end else None,
            terminal=terminal,
            relaxed=self.relaxed,
            prompt_logprobs=self.prompt_logprobs if start == 0 < end else None,
        )


def submit_of(submission: Submission, key: int) -> Submit:
    """The request as the rank takes it, with the rank's key for it."""
    prefill = submission.prefill
    return Submit(
        key=key,
        request=submission.request,
        remote_prefill=prefill is not None,
        sender_slot_bytes=None if prefill is None else prefill.slot_bytes,
        sender_draft_layers=None if prefill is None else prefill.draft_layers,
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
        share=submission.request.share,
        prefill=submission.prefill,
        token_weight=weight,
    )


def finish_with(first_token_id: int, stop: StopConditions, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """How a request ends at a first token that a prefill worker drew; None if it continues.

    eos_token_ids: the model's own. For later tokens the rank that draws them decides (`engine.requests.outcomes`).
    """
    if first_token_id in stop.ends(eos_token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if stop.max_tokens == 1 else None


def prefill_lost(target: WorkerTarget, message: str) -> PrefillLost:
    """The error of a request whose prompt did not come from that worker."""
    return PrefillLost(f"prefill worker {target.worker_id}: {message}", metadata={"worker_id": target.worker_id})


def terminal_of(request: Request, output: Output) -> Terminal | None:
    """How the request ended, according to a rank's output; None if it continues."""
    if output.refusal is None:
        return output.finish
    reason, message = output.refusal.reason, output.refusal.message
    if reason == PrefillLost.reason and request.prefill is not None:
        return prefill_lost(request.prefill, message)
    return rebuild(reason, message)

"""How fast steps have been going, and prompts with exact and with sparse attention."""

from collections.abc import Sequence

import msgspec

from engine.pace.smoothing import SmoothedRatio
from mesh.domain.sparse_prefill import sparse_part
from mesh.domain.workers import PromptPace


class PromptTokens(msgspec.Struct, frozen=True):
    """The prompt tokens of one step: how many are attended to exactly and how many sparsely. The context of either kind
    is the sum, over its tokens, of how many tokens are before each.
    """

    exact: int = 0
    sparse: int = 0
    exact_context: float = 0.0
    sparse_context: float = 0.0

    @property
    def all(self) -> int:
        return self.exact + self.sparse

    def with_chunk(self, start: int, end: int, sparse_from: int | None) -> "PromptTokens":
        """These, and the tokens at positions [start, end) of a prompt."""
        middle = end - sparse_part(start, end, sparse_from)
        return PromptTokens(
            self.exact + middle - start,
            self.sparse + end - middle,
            self.exact_context + (middle - start) * (start + middle) / 2,
            self.sparse_context + (end - middle) * (middle + end) / 2,
        )


NO_PROMPTS = PromptTokens()


class PromptPaceMeter:
    """Learns both paces from steps that have one kind, and divides the time of mixed steps by what it knows so far."""

    def __init__(self) -> None:
        self._exact = _Kind()
        self._sparse = _Kind()

    def observe(self, prompts: PromptTokens, seconds: float, decay: float) -> None:
        sparse_share = self._sparse_share(prompts)
        if prompts.exact:
            self._exact.observe(prompts.exact, prompts.exact_context, seconds, 1.0 - sparse_share, decay)
        if prompts.sparse:
            self._sparse.observe(prompts.sparse, prompts.sparse_context, seconds, sparse_share, decay)

    @property
    def exact(self) -> PromptPace | None:
        """None while unknown."""
        return self._exact.pace

    @property
    def sparse(self) -> PromptPace | None:
        """None while unknown."""
        return self._sparse.pace

    def _sparse_share(self, prompts: PromptTokens) -> float:
        """The sparse tokens' share of a step's time. Tokens of both kinds take equally long until both are known."""
        exact, sparse = self._exact.pace, self._sparse.pace
        weight = 1.0 if exact is None or sparse is None else exact.tokens_per_second / sparse.tokens_per_second
        return prompts.sparse * weight / (prompts.exact + prompts.sparse * weight)


class _Kind:
    def __init__(self) -> None:
        self._rate = SmoothedRatio()
        self._context = SmoothedRatio()
        self._step_tokens = SmoothedRatio()

    def observe(self, tokens: int, context: float, seconds: float, share: float, decay: float) -> None:
        """A step of `seconds`, of which these tokens took `share`."""
        self._rate.observe(tokens, seconds * share, decay)
        self._context.observe(context, tokens, decay)
        self._step_tokens.observe(tokens, share, decay)

    @property
    def pace(self) -> PromptPace | None:
        rate = self._rate.value
        return None if rate is None else PromptPace(rate, self._context.value or 0.0, self._step_tokens.value)


# Weight of the past against one more step.
STEP_DECAY = 0.98
# A step of less than 20 ms weighs as much as its share of this time. Otherwise a single short step that the machine
# held up would dominate a mean over dozens.
STEP_MEMORY_SECONDS = 1.0
# How far back the time counts that prompts have taken from requests that decode. One prompt of a second says little of
# the next tokens; many in a row are what the next request has to expect.
PROMPTS_MEMORY_SECONDS = 10.0
# A smaller share is none.
LEAST_PROMPTS_SHARE = 1e-6


class StepMeter:
    """Smooths what steps report. `Pacing` writes it, and `Report` reads it.

    Steps with prompts count for the time of a decode step by the share of the time that prompts take in the long run:
    how long a step takes without them, and this share, are measured apart. The rate of prompts includes what decodes.
    """

    def __init__(self) -> None:
        self._prefill_tokens_per_second = SmoothedRatio()
        self._prompt_paces = PromptPaceMeter()
        # Milliseconds of a step without prompts.
        self._quiet_step_ms = SmoothedRatio()
        # The share of the time of steps with decoding requests that prompts took.
        self._prompts_share = 0.0
        self._decode_step_requests = SmoothedRatio()

    def observe_step(
        self,
        seconds: float,
        decoding: int,
        prompts: PromptTokens = NO_PROMPTS,
        accepted_drafts: int = 0,
        prompt_rows: int = 0,
        quiet: bool = True,
    ) -> None:
        """A step in which `decoding` requests drew a token each, and accepted `accepted_drafts` drafts in all.

        prompt_rows: how many tokens of prompts were computed as if they were requests that decode. quiet: neither this
        rank nor another of the worker computed other prompts, nor began to before this step was seen to end.
        """
        decay = _step_decay(seconds)
        if prompts.all:
            self._prefill_tokens_per_second.observe(prompts.all, seconds, decay)
            self._prompt_paces.observe(prompts, seconds, decay)
        if not decoding:
            return
        # A step counts as many times as it brought each request a token.
        tokens = 1.0 + accepted_drafts / decoding
        quiet_ms, taken_seconds = self._quiet_step_ms.value, 0.0
        if quiet or quiet_ms is None:
            # On a worker whose first steps all have prompts, these are the best estimate.
            self._quiet_step_ms.observe(seconds * 1000.0, tokens, decay)
            self._decode_step_requests.observe(decoding + prompt_rows, 1.0, decay)
        else:
            taken_seconds = max(seconds - quiet_ms * tokens / 1000.0, 0.0)
        self._prompts_share = _share_after(self._prompts_share, seconds, taken_seconds)

    def observe_decode_steps(self, seconds: Sequence[float], decoding: int) -> None:
        """Steps one after the other, in each of which these requests drew a token each, and nothing else happened."""
        floor, memory = STEP_DECAY, STEP_MEMORY_SECONDS
        # The same as `_step_decay`, without a call for each step.
        decays = [floor if (decay := 1.0 - each / memory) < floor else decay for each in seconds]
        self._quiet_step_ms.observe_all([each * 1000.0 for each in seconds], 1.0, decays)
        for each in seconds if self._prompts_share else ():
            self._prompts_share = _share_after(self._prompts_share, each, 0.0)
        self._decode_step_requests.observe_equal(decoding, 1.0, decays)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """None while unknown, as with all that follow."""
        return self._prefill_tokens_per_second.value

    @property
    def decode_step_ms(self) -> float | None:
        quiet_ms = self._quiet_step_ms.value
        return None if quiet_ms is None else quiet_ms / (1.0 - self._prompts_share)

    @property
    def decode_step_requests(self) -> float | None:
        return self._decode_step_requests.value

    @property
    def exact_prompts(self) -> PromptPace | None:
        return self._prompt_paces.exact

    @property
    def sparse_prompts(self) -> PromptPace | None:
        return self._prompt_paces.sparse


def _step_decay(seconds: float) -> float:
    return max(STEP_DECAY, 1.0 - seconds / STEP_MEMORY_SECONDS)


def _share_after(share: float, seconds: float, taken_seconds: float) -> float:
    """The new share of the time that prompts take, after a step in which they took `taken_seconds`."""
    weight = min(seconds / PROMPTS_MEMORY_SECONDS, 1.0)
    share *= 1.0 - weight
    if taken_seconds:
        share += weight * taken_seconds / seconds
    return share if share > LEAST_PROMPTS_SHARE else 0.0

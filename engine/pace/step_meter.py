"""How fast steps have been going."""

from collections.abc import Sequence

from engine.pace.prompt_pace import NO_PROMPTS, PromptPaceMeter, PromptTokens
from engine.pace.smoothing import SmoothedRatio
from mesh.domain.workers import PromptPace

# Weight of the past against one more step.
STEP_DECAY = 0.98
# A step of less than 20 ms weighs as much as its share of this time. Otherwise a single short step that the machine
# held up would dominate a mean over dozens.
STEP_MEMORY_SECONDS = 1.0
# How far back the time counts that prompts have taken from requests that decode. One prompt of a second says little of
# the next tokens; many in a row are what a request that comes has to expect.
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
        # Which share of the time in which requests decoded was taken by prompts.
        self._prompts_share = 0.0
        self._decode_step_requests = SmoothedRatio()

    def observe_step(
        self,
        seconds: float,
        decoding: int,
        prompts: PromptTokens = NO_PROMPTS,
        accepted_drafts: int = 0,
        beside: int = 0,
        quiet: bool = True,
    ) -> None:
        """A step in which `decoding` requests drew a token each, and behind them `accepted_drafts` tokens in all.

        beside: how many tokens of prompts were computed as if they were requests that decode. quiet: neither this rank
        nor another of the worker computed other prompts, nor began to before this step was seen to end.
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
            # A worker that is flooded from its start has nothing better to tell than a step with prompts.
            self._quiet_step_ms.observe(seconds * 1000.0, tokens, decay)
            self._decode_step_requests.observe(decoding + beside, 1.0, decay)
        else:
            taken_seconds = max(seconds - quiet_ms * tokens / 1000.0, 0.0)
        self._prompts_share = _share_behind(self._prompts_share, seconds, taken_seconds)

    def observe_decode_steps(self, seconds: Sequence[float], decoding: int) -> None:
        """Steps one after the other, in each of which these requests drew a token each, and nothing else happened."""
        floor, memory = STEP_DECAY, STEP_MEMORY_SECONDS
        # The same as `_step_decay`, without a call for each step.
        decays = [floor if (decay := 1.0 - each / memory) < floor else decay for each in seconds]
        self._quiet_step_ms.observe_all([each * 1000.0 for each in seconds], 1.0, decays)
        for each in seconds if self._prompts_share else ():
            self._prompts_share = _share_behind(self._prompts_share, each, 0.0)
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


def _share_behind(share: float, seconds: float, taken_seconds: float) -> float:
    """The share of the time that prompts take, once a step is counted of which they took `taken_seconds`."""
    weight = min(seconds / PROMPTS_MEMORY_SECONDS, 1.0)
    share *= 1.0 - weight
    if taken_seconds:
        share += weight * taken_seconds / seconds
    return share if share > LEAST_PROMPTS_SHARE else 0.0

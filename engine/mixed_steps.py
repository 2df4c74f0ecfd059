"""How many tokens of prompts a step computes beside requests that decode, so that it ends in a set time."""

from collections.abc import Sequence

from engine.smoothing import SmoothedRatio
from mesh.blocks import BLOCK_TOKENS

# Before any step with prompts has been measured.
FIRST_TOKENS = 4 * BLOCK_TOKENS
# So many go on in every step, whatever it takes.
FEWEST_TOKENS = 16
# Weight of the past against one more step. What a token takes grows with the tokens before it.
DECAY = 0.7


class MixedSteps:
    """Learns what steps take without prompts, and what a token of a prompt adds.

    That includes its share of what prompts cost however short they are: so the number comes near the right one from
    step to step, the more slowly the more of the time this is.
    """

    def __init__(self, step_ms: float | None) -> None:
        """step_ms: how long a step with both may take; None is as long as it takes."""
        self._step_ms = step_ms
        self._without_ms = SmoothedRatio()
        self._token_ms = SmoothedRatio()

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """prompt_tokens: the most that any rank computed as those of prompts."""
        if self._step_ms is None:
            return
        ms = seconds * 1000
        if prompt_tokens:
            self._token_ms.observe(max(ms - (self._without_ms.value or 0.0), 0.0), prompt_tokens, DECAY)
        else:
            self._without_ms.observe(ms, 1.0, DECAY)

    def observe_decode_steps(self, seconds: Sequence[float]) -> None:
        """Steps one after the other that computed nothing of prompts."""
        if self._step_ms is not None:
            self._without_ms.observe_all([each * 1000 for each in seconds], 1.0, [DECAY] * len(seconds))

    @property
    def most_prompt_tokens(self) -> int | None:
        """How many each rank may compute in the next step; None if the time is not set."""
        if self._step_ms is None:
            return None
        token_ms = self._token_ms.value
        if token_ms is None:
            return FIRST_TOKENS
        return max(int((self._step_ms - (self._without_ms.value or 0.0)) / token_ms), FEWEST_TOKENS)

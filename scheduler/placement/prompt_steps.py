"""In how many steps a rank computes its prompts: each takes `CostModel.prefill_step_ms` besides its tokens. Pure.

A prompt that comes before a step begins is computed in that step, with the prompts that wait for it already, as far
as they fit. Then it costs no further step.
"""

from math import inf

import msgspec


class LastStep(msgspec.Struct, frozen=True, gc=False):
    """The last step in which a rank will compute the prompts that it has, as far as its scheduler can tell."""

    # When the step begins, and the prompt tokens that it computes.
    begins_at: float = -inf
    tokens: int = 0

    def further_steps(self, tokens: int, comes_at: float, most: int | None) -> int:
        """How many more steps the rank takes for a prompt of `tokens` tokens that comes at `comes_at`.

        most: tokens of a step; None if it is unknown, and all fit.
        """
        room = 0
        if comes_at < self.begins_at:
            if most is None:
                return 0
            room = most - self.tokens
        return steps_of(tokens - room, most)

    def after(self, tokens: int, comes_at: float, ends_at: float, seconds: float, most: int | None) -> "LastStep":
        """The last step with such a prompt added, which takes `seconds`, so that all prompts end at `ends_at`."""
        joins = comes_at < self.begins_at
        together = tokens + (self.tokens if joins else 0)
        if most is None or together <= most:
            return LastStep(self.begins_at if joins else ends_at - seconds, together)
        left = _left(together, most)
        return LastStep(ends_at - seconds * min(left / tokens, 1.0), left)


def last_step_of(tokens: int, begins_at: float, ends_at: float, most: int | None) -> LastStep:
    """The last of the steps that compute `tokens` prompt tokens from `begins_at` to `ends_at`."""
    if most is None or tokens <= most:
        return LastStep(begins_at, tokens)
    left = _left(tokens, most)
    return LastStep(ends_at - (ends_at - begins_at) * left / tokens, left)


def steps_of(tokens: int, most: int | None) -> int:
    """How many steps this many tokens take. most: as in `LastStep`."""
    if tokens <= 0:
        return 0
    return 1 if most is None else -(-tokens // most)


def _left(tokens: int, most: int) -> int:
    """How many tokens the last of their steps has."""
    return tokens % most or most

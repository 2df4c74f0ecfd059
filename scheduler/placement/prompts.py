"""When a rank begins its prompts, and in how many steps it computes them. Pure.

Each step takes `CostModel.prefill_step_ms` in addition to its tokens. A prompt that arrives before a step begins is
computed in that step together with the prompts that wait for it already, as far as they fit: it then costs no further
step.

DP ranks of one worker step together, and may make prompts wait for one another (`engine/pace/alignment.py` decides).
Waiting prompts begin together: with the next step if no rank decodes, if a prompt in progress continues after that
step, if all ranks have a waiting prompt, or if none has arrived for as many steps as a prompt may wait. Otherwise they
begin once the first of them has waited for that many steps.
"""

from math import ceil, inf

import msgspec

from mesh.domain.workers import WorkerLoad


class LastStep(msgspec.Struct, frozen=True, gc=False):
    """The last step in which a rank will compute the prompts that it has, as far as its scheduler can tell."""

    # When the step begins, and the prompt tokens that it computes.
    begins_at: float = -inf
    tokens: int = 0

    def further_steps(self, tokens: int, comes_at: float, most: int) -> int:
        """How many more steps the rank takes for a prompt of `tokens` tokens that arrives at `comes_at`.

        most: tokens of a step.
        """
        room = most - self.tokens if comes_at < self.begins_at else 0
        return steps_of(tokens - room, most)

    def after(self, tokens: int, comes_at: float, ends_at: float, seconds: float, most: int) -> "LastStep":
        """The last step with such a prompt added, which takes `seconds`, so that all prompts end at `ends_at`."""
        joins = comes_at < self.begins_at
        together = tokens + (self.tokens if joins else 0)
        if together <= most:
            return LastStep(self.begins_at if joins else ends_at - seconds, together)
        left = _left(together, most)
        return LastStep(ends_at - seconds * min(left / tokens, 1.0), left)


def last_step_of(tokens: int, begins_at: float, ends_at: float, most: int) -> LastStep:
    """The last of the steps that compute `tokens` prompt tokens from `begins_at` to `ends_at`."""
    if tokens <= most:
        return LastStep(begins_at, tokens)
    left = _left(tokens, most)
    return LastStep(ends_at - (ends_at - begins_at) * left / tokens, left)


def prompt_step_tokens(load: WorkerLoad, max_step_tokens: int) -> int:
    """The most prompt tokens of each next step of a rank with this load: fewer while requests decode evenly."""
    even = load.even_step_tokens if load.running_requests else None
    return max_step_tokens if even is None else min(even, max_step_tokens)


def steps_of(tokens: int, most: int) -> int:
    """How many steps this many tokens take. most: as in `LastStep`."""
    return -(-tokens // most) if tokens > 0 else 0


def _left(tokens: int, most: int) -> int:
    """How many tokens the last of their steps has."""
    return tokens % most or most


class JointPrompts(msgspec.Struct, frozen=True, gc=False):
    """What a scheduler knows of the prompts on a worker's ranks. Times are on the clock of `Candidates.now`."""

    # When the first of these prompts began or will begin, and when all of them will be computed.
    begin_at: float
    end_at: float
    # Whether every rank except the one in question has waiting prompts.
    others_wait: bool
    # Most tokens that a rank computes in a step, and most steps that a prompt waits.
    step_tokens: int
    wait_steps: int
    # Least size, in tokens, of a prompt that all ranks compute together; None if they compute none together.
    divided_tokens: int | None = None

    def begins_at(self, comes_at: float, next_step_at: float, step_seconds: float, wait_seconds: float) -> float:
        """When a further prompt begins that arrives at `comes_at` and has a place from the step at `next_step_at` on.

        step_seconds: time of a step full of prompts; wait_seconds: the longest wait for prompts of other ranks.
        """
        if comes_at < self.begin_at:
            return next_step_at if self.others_wait else max(self.begin_at, next_step_at)
        if comes_at < self.end_at:
            step_ends_at = self.begin_at + ceil((comes_at - self.begin_at) / step_seconds) * step_seconds
            # The ranks have already agreed on their last step with these prompts: a prompt that arrives during it must
            # wait.
            return max(step_ends_at if step_ends_at < self.end_at else self.end_at + wait_seconds, next_step_at)
        return next_step_at if comes_at >= self.end_at + wait_seconds else next_step_at + wait_seconds

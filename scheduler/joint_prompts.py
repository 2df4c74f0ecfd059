"""When a prompt begins on a worker whose DP ranks step together, and may have prompts wait for one another. Pure.

Prompts that wait begin together (`engine/alignment.py` decides when): with the next step if nobody decodes, if a prompt
that is under way goes on behind that step, if all ranks have one, or if none has come for as many steps as a prompt may
wait; else once the first of them has waited for so many.
"""

from math import ceil

import msgspec


class JointPrompts(msgspec.Struct, frozen=True, gc=False):
    """What a scheduler knows of the prompts that the ranks of a worker have. Times are those of `Candidates.now`."""

    # When the first of them began, or will begin, and when all of them will be computed.
    begin_at: float
    end_at: float
    # Whether each rank but the one that is asked about has some that wait.
    others_wait: bool
    # The most tokens that a rank computes in a step, and for how many steps a prompt waits at most.
    step_tokens: int
    wait_steps: int
    # Tokens of a prompt that all ranks compute together, at least; None if they compute none so.
    divided_tokens: int | None = None

    def begins_at(self, comes_at: float, next_step_at: float, token_seconds: float, wait_seconds: float) -> float:
        """When one more begins that comes then, if it has a place from that step on.

        token_seconds: of each token of a prompt; wait_seconds: the longest wait for prompts of other ranks.
        """
        if comes_at < self.begin_at:
            return next_step_at if self.others_wait else max(self.begin_at, next_step_at)
        if comes_at < self.end_at:
            step_seconds = self.step_tokens * token_seconds
            step_ends_at = self.begin_at + ceil((comes_at - self.begin_at) / step_seconds) * step_seconds
            # The last of their steps has been agreed on: what comes during that waits.
            return max(step_ends_at if step_ends_at < self.end_at else self.end_at + wait_seconds, next_step_at)
        return next_step_at if comes_at >= self.end_at + wait_seconds else next_step_at + wait_seconds

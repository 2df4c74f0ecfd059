"""When a prompt begins on a worker whose DP ranks step together and may make prompts wait for one another. Pure.

Waiting prompts begin together (`engine/pace/alignment.py` decides when). They begin with the next step if no rank
decodes, if a prompt in progress continues after that step, if all ranks have a waiting prompt, or if none has come
for as many steps as a prompt may wait. Otherwise they begin once the first of them has waited for that many steps.
"""

from math import ceil

import msgspec


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
    # Least size, in tokens, of a prompt that all ranks compute together; None if there are no such prompts.
    divided_tokens: int | None = None

    def begins_at(self, comes_at: float, next_step_at: float, step_seconds: float, wait_seconds: float) -> float:
        """When a further prompt begins that comes at `comes_at` and has a place from the step at `next_step_at` on.

        step_seconds: time of a step full of prompts; wait_seconds: the longest wait for prompts of other ranks.
        """
        if comes_at < self.begin_at:
            return next_step_at if self.others_wait else max(self.begin_at, next_step_at)
        if comes_at < self.end_at:
            step_ends_at = self.begin_at + ceil((comes_at - self.begin_at) / step_seconds) * step_seconds
            # The ranks have already agreed on their last step with these prompts: a prompt that comes during it must
            # wait.
            return max(step_ends_at if step_ends_at < self.end_at else self.end_at + wait_seconds, next_step_at)
        return next_step_at if comes_at >= self.end_at + wait_seconds else next_step_at + wait_seconds

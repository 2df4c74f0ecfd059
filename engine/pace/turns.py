"""Which rank's prompt all ranks of a worker compute together, if several have one. Pure.

A step divides one chunk over all ranks (context parallelism). A second rank that computed a chunk of its own prompt in
the same step would make it several times as long, so while requests decode such prompts go one after another: first the
one that has begun, then the next rank's.
"""

from dataclasses import dataclass, replace
from typing import Self

from engine.step.shape import StepShape

# Tokens of a prompt that waits for its turn. Two ranks compute two shorter ones at once in less time than all ranks one
# after the other, since a step with prompts takes the hosts longer than the GPUs (four H200, DeepSeek-R1).
LONG_PROMPT = 2048
# The prompts of one rank go first in at most this many steps, so that a very long one leaves others their turn.
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Turns:
    """Every rank decides alike about `holder`, `steps` and `contested`, since each derives them from the shapes that
    all have agreed on.
    """

    # DP ranks of the worker, and this one's number among them.
    ranks: int
    rank: int
    # The rank that goes first among those of which none else does.
    holder: int = 0
    # In how many steps on end prompts were computed while other ranks' waited.
    steps: int = 0
    # Whether the only prompt that has begun has gone first for long enough.
    contested: bool = False
    # How many ranks have such a prompt left after the last step, and on how many of them it has begun.
    dividing: int = 0
    begun: int = 0
    # The same of this rank alone.
    own: bool = False
    own_begun: bool = False

    def proposing(self, own: bool, own_begun: bool) -> Self:
        """What is left here after the step that is proposed."""
        return self if (own, own_begun) == (self.own, self.own_begun) else replace(self, own=own, own_begun=own_begun)

    def after(self, shape: StepShape) -> Self:
        """The turns once a step of that shape is agreed on."""
        holder, steps, contested = self.holder, 0, False
        if shape.dividing > 1:
            steps, contested = self.steps + 1, self.contested and shape.begun > 0
            if shape.decode_only or not shape.begun or steps == MOST_STEPS:
                # The holder has no prompt, has ended one, or has gone first for long enough.
                contested = contested or steps == MOST_STEPS
                holder, steps = (holder + 1) % self.ranks, 0
        if (holder, steps, contested, shape.dividing, shape.begun) == (
            self.holder,
            self.steps,
            self.contested,
            self.dividing,
            self.begun,
        ):
            return self
        return replace(
            self, holder=holder, steps=steps, contested=contested, dividing=shape.dividing, begun=shape.begun
        )

    @property
    def open(self) -> bool:
        """Whether this rank may compute a chunk that is to be divided, in the next step in which requests decode."""
        if self.dividing == self.own:
            return True
        if self.begun == 1 and not self.contested:
            return self.own_begun
        goes = self.own_begun if self.begun > 1 else self.own
        return goes and self.holder == self.rank

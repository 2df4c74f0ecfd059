"""When prompts that wait may begin, on a worker of several DP ranks: with those of the other ranks. Pure.

The ranks exchange experts in every layer, so a step takes as long as its slowest rank: a prompt on one of them holds up
what decodes on all. Prompts of several ranks in one step hold it up once. TensorRT-LLM waits for them likewise
(`attention_dp_config.batching_wait_iters`). What `mesh.tails` calls a tail holds up nobody, and waits for none.
"""

from dataclasses import dataclass, replace
from typing import Self

from engine.batch import StepShape


@dataclass(frozen=True, slots=True)
class Alignment:
    """Every rank decides alike, since each derives it from the shapes that all have agreed on."""

    # DP ranks of the worker.
    ranks: int
    # How many steps a prompt waits for those of other ranks at most; 0 waits for none.
    most_steps: int
    # For how many steps the first of those that wait has waited.
    waited: int = 0
    # For how many steps no prompt has been computed, nor waited.
    quiet: int = 0
    # Whether prompts that wait may begin with the next step.
    opens: bool = True

    def after(self, shape: StepShape) -> Self:
        """Once a step of that shape is agreed on."""
        if self.ranks == 1 or not self.most_steps or not shape.decodes:
            # Nobody is held up.
            return replace(self, waited=0, quiet=0, opens=True) if self.waited or self.quiet or not self.opens else self
        if not shape.waiting_prompts:
            # The next to come is to wait, unless a prompt that is not done holds up everyone anyway, or prompts come so
            # rarely that it would wait in vain.
            quiet = 0 if shape.beginning or shape.prefills else self.quiet + 1
            return replace(self, waited=0, quiet=quiet, opens=shape.prefills or quiet >= self.most_steps)
        waited = self.waited + 1
        opens = shape.prefills or shape.waiting_prompts == self.ranks or waited >= self.most_steps
        return replace(self, waited=0 if opens else waited, quiet=0, opens=opens)

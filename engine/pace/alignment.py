"""When waiting prompts may begin on a worker of several DP ranks: together with those of the other ranks. Pure.

The ranks exchange experts in every layer, so a step takes as long as its slowest rank: a prompt on one of them holds up
requests that decode on all. Prompts of several ranks in one step hold them up once. TensorRT-LLM waits for them
likewise (`attention_dp_config.batching_wait_iters`). A tail (see `mesh.tails`) holds up no request, and does not wait.
"""

from dataclasses import dataclass, replace
from typing import Self

from engine.step.shape import StepShape


@dataclass(frozen=True, slots=True)
class Alignment:
    """Every rank decides alike, since each derives it from the shapes that all have agreed on."""

    # DP ranks of the worker.
    ranks: int
    # How many steps a prompt waits at most for those of other ranks; 0 if it does not wait.
    most_steps: int
    # For how many steps prompts have been waiting.
    waited: int = 0
    # For how many steps no prompt has been computed or been waiting.
    quiet: int = 0
    # Whether waiting prompts may begin with the next step.
    opens: bool = True

    def after(self, shape: StepShape) -> Self:
        """The alignment once a step of that shape is agreed on."""
        if self.ranks == 1 or not self.most_steps or not shape.decodes:
            # Prompts hold up no request that decodes.
            return replace(self, waited=0, quiet=0, opens=True) if self.waited or self.quiet or not self.opens else self
        if not shape.waiting_prompts:
            # The next prompt to come waits, unless an unfinished prompt holds up all ranks anyway, or prompts come so
            # rarely that it would wait in vain.
            quiet = 0 if shape.beginning or shape.prefills else self.quiet + 1
            return replace(self, waited=0, quiet=quiet, opens=shape.prefills or quiet >= self.most_steps)
        waited = self.waited + 1
        opens = shape.prefills or shape.waiting_prompts == self.ranks or waited >= self.most_steps
        return replace(self, waited=0 if opens else waited, quiet=0, opens=opens)

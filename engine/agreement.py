"""How the ranks of a worker come to launch steps of one shape."""

from typing import Protocol

from engine.batch import StepShape


class Agreement(Protocol):
    """Asked once for each step, by every rank, in the same order."""

    def agree(self, proposal: StepShape) -> StepShape:
        """What all ranks launch next, given what this one has to compute. No smaller than the proposal."""
        ...


class OneRank:
    """A worker of one rank does as it proposes."""

    def agree(self, proposal: StepShape) -> StepShape:
        return proposal

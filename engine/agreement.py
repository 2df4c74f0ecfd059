"""How the ranks of a worker come to launch steps of one shape."""

from collections.abc import Sequence
from typing import Protocol

from engine.batch import StepShape


class Agreement(Protocol):
    """Asked once for each step, by every rank, in the same order."""

    @property
    def due(self) -> bool:
        """Whether another rank waits for this one's proposal, so that it has to step even without work."""
        ...

    def agree(self, proposal: StepShape) -> StepShape:
        """What all ranks launch next, given what this one has to compute. No smaller than the proposal."""
        ...


class OneRank:
    """A worker of one rank does as it proposes."""

    due = False

    def agree(self, proposal: StepShape) -> StepShape:
        return proposal


def agreed(proposals: Sequence[StepShape]) -> StepShape:
    """The least shape that holds what every rank proposes. They stop together, once all want to."""
    return StepShape(
        tokens=max(each.tokens for each in proposals),
        decode_only=all(each.decode_only for each in proposals),
        stopping=all(each.stopping for each in proposals),
        drafts=max(each.drafts for each in proposals),
        drawing=max(each.drawing for each in proposals),
        beginning=max(each.beginning for each in proposals),
        waiting_prompts=sum(each.waiting_prompts for each in proposals),
        decodes=any(each.decodes for each in proposals),
        prefills=any(each.prefills for each in proposals),
    )

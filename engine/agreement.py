"""How the ranks of a worker come to launch steps of one shape."""

from collections.abc import Sequence
from functools import reduce
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
    return reduce(_both, proposals)


def _both(one: StepShape, other: StepShape) -> StepShape:
    return StepShape(
        tokens=max(one.tokens, other.tokens),
        decode_only=one.decode_only and other.decode_only,
        stopping=one.stopping and other.stopping,
        drafts=max(one.drafts, other.drafts),
        drawing=max(one.drawing, other.drawing),
        beginning=max(one.beginning, other.beginning),
        waiting_prompts=one.waiting_prompts + other.waiting_prompts,
        decodes=one.decodes or other.decodes,
        prefills=one.prefills or other.prefills,
    )

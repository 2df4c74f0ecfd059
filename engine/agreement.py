"""How the ranks of a worker come to launch steps of one shape."""

from collections.abc import Iterable
from typing import Protocol

from engine.batch import StepShape


class Agreement(Protocol):
    """Asked once for each step, by every rank, in the same order."""

    @property
    def due(self) -> bool:
        """Whether another rank waits for this one's proposal, so that it has to step even without work.

        If not, this one may sleep until it is woken.
        """
        ...

    def agree(self, proposal: StepShape) -> StepShape:
        """What all ranks launch next, given what this one has to compute. No smaller than the proposal."""
        ...


class OneRank:
    """A worker of one rank does as it proposes."""

    due = False

    def agree(self, proposal: StepShape) -> StepShape:
        return proposal


def agreed(proposal: StepShape, others: Iterable[tuple[int, ...]]) -> StepShape:
    """The least shape that holds what every rank proposes. They stop together, once all want to.

    others: the fields of their proposals, in order. Written out, because it delays every step of every rank.
    """
    for tokens, decode_only, stopping, drafts, drawing, beginning, waiting_prompts, decodes, prefills in others:
        proposal = StepShape(
            tokens if tokens > proposal.tokens else proposal.tokens,
            proposal.decode_only and decode_only == 1,
            proposal.stopping and stopping == 1,
            drafts if drafts > proposal.drafts else proposal.drafts,
            drawing if drawing > proposal.drawing else proposal.drawing,
            beginning if beginning > proposal.beginning else proposal.beginning,
            proposal.waiting_prompts + waiting_prompts,
            proposal.decodes or decodes == 1,
            proposal.prefills or prefills == 1,
        )
    return proposal

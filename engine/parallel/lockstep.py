"""Agreement of ranks over host memory: no collective of the device, and no time of it."""

from collections.abc import Callable

from msgspec.structs import astuple, fields

from engine.agreement import agreed
from engine.batch import StepShape
from engine.parallel.board import Board

_TYPES = tuple(field.type for field in fields(StepShape))
# A record on the board has a number for each field of a proposal.
NUMBERS = len(_TYPES)


class Lockstep:
    """engine.agreement.Agreement."""

    def __init__(self, board: Board, wake: Callable[[], None]) -> None:
        """wake: the other ranks, which may sleep while they have nothing to compute."""
        self._board = board
        self._wake = wake

    @property
    def due(self) -> bool:
        return self._board.due

    def agree(self, proposal: StepShape) -> StepShape:
        """Raises RankLost."""
        # The order of the ranks makes no difference.
        return agreed(proposal, self._board.bring(astuple(proposal), self._wake))

    def of_first(self, shape: StepShape) -> StepShape:
        """The first rank's, on every rank. Raises RankLost."""
        brought = self._board.bring(astuple(shape), self._wake)
        if self._board.rank == 0:
            return shape
        return StepShape(*(make(number) for make, number in zip(_TYPES, brought[0], strict=True)))

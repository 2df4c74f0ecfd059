"""How long a rank's host is busy agreeing on steps."""

import time
from collections.abc import Callable

from engine.batch import StepShape
from engine.parallel.board import Board, Record
from engine.parallel.lockstep import Lockstep
from engine.parallel.peers import Peers


class AgreementClock:
    """Measures agreements without the waits for other ranks, which the device's step before hides.

    Attributes:
        agreement: what is measured.
    """

    def __init__(self, peers: Peers) -> None:
        self._steps, self._seconds = 0, 0.0
        self._board = _ClockedBoard(peers.steps)
        self.agreement = self._clocked(Lockstep(self._board, peers.wake))

    def restart(self) -> None:
        self._steps, self._seconds, self._board.waited = 0, 0.0, 0.0

    def mean_seconds(self) -> float:
        return (self._seconds - self._board.waited) / max(self._steps, 1)

    def _clocked(self, lockstep: Lockstep) -> Lockstep:
        agree = lockstep.agree

        def clocked(proposal: StepShape) -> StepShape:
            started = time.perf_counter()
            agreed = agree(proposal)
            self._seconds += time.perf_counter() - started
            self._steps += 1
            return agreed

        lockstep.agree = clocked  # type: ignore[method-assign]
        return lockstep


class _ClockedBoard(Board):
    """One that exists; it also counts the seconds of its waits, but not those in which it wakes others."""

    def __init__(self, board: Board) -> None:
        self.__dict__.update(board.__dict__)
        self.waited = 0.0

    def _await(self, number: int, rank: int, place: int, wake: Callable[[], None]) -> Record:
        started = time.perf_counter()
        busy = 0.0

        def timed() -> None:
            nonlocal busy
            waking = time.perf_counter()
            wake()
            busy += time.perf_counter() - waking

        found = super()._await(number, rank, place, timed)
        self.waited += time.perf_counter() - started - busy
        return found

"""How long a rank's host is busy agreeing on steps."""

import time

from engine.parallel.lockstep import Lockstep
from engine.parallel.peers import Peers
from engine.step.shape import StepShape


class AgreementClock:
    """Measures agreements without the waits for other ranks, which the device's step before hides.

    Attributes:
        agreement: the peers' own, which is measured from now on.
    """

    def __init__(self, peers: Peers) -> None:
        self._steps, self._seconds = 0, 0.0
        self.agreement = peers.steps
        self._clock(peers.steps)

    def restart(self) -> None:
        self._steps, self._seconds = 0, 0.0

    def mean_seconds(self) -> float:
        return self._seconds / max(self._steps, 1)

    def _clock(self, lockstep: Lockstep) -> None:
        """Wrap methods of this object. A subclass would have code of its own, which would leave the processor's caches
        between steps as well, and its time would count.
        """
        agree, wait, wake = lockstep.agree, lockstep._await, lockstep._wake

        def clocked(proposal: StepShape) -> StepShape:
            started = time.perf_counter()
            agreed = agree(proposal)
            self._seconds += time.perf_counter() - started
            self._steps += 1
            return agreed

        def waiting(bit: int, rank: int, place: int) -> int:
            started = time.perf_counter()
            found = wait(bit, rank, place)
            self._seconds -= time.perf_counter() - started
            return found

        def waking() -> None:
            """Count the time of waking others, which happens within the wait that is subtracted."""
            started = time.perf_counter()
            wake()
            self._seconds += time.perf_counter() - started

        lockstep.agree = clocked  # type: ignore[method-assign]
        lockstep._await = waiting  # type: ignore[method-assign]
        lockstep._wake = waking

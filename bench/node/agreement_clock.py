"""How long a rank's host is busy agreeing on steps."""

import time
from collections.abc import Callable

from engine.batch import StepShape
from engine.parallel.lockstep import Lockstep
from engine.parallel.meeting import Meeting
from engine.parallel.peers import Peers


class AgreementClock:
    """Measures agreements without the waits for other ranks, which the device's step before hides.

    Attributes:
        agreement: what is measured.
    """

    def __init__(self, peers: Peers) -> None:
        self._steps, self._seconds = 0, 0.0
        self._meeting = _ClockedMeeting(peers.steps)
        self.agreement = self._clocked(Lockstep(self._meeting, peers.wake))

    def restart(self) -> None:
        self._steps, self._seconds, self._meeting.waited = 0, 0.0, 0.0

    def mean_seconds(self) -> float:
        return (self._seconds - self._meeting.waited) / max(self._steps, 1)

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


class _ClockedMeeting(Meeting):
    """One that exists; it also counts the seconds of its waits."""

    def __init__(self, meeting: Meeting) -> None:
        self.__dict__.update(meeting.__dict__)
        self.waited = 0.0

    def wait(self, before: Callable[[], None] | None = None) -> None:
        started = time.perf_counter()
        busy = 0.0

        def timed() -> None:
            nonlocal busy
            if before is not None:
                before()
            busy = time.perf_counter() - started

        super().wait(timed)
        self.waited += time.perf_counter() - started - busy

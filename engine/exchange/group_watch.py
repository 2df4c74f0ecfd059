"""Ends what a GPU waits for once the worker's ranks cannot go on together."""

import threading
from collections.abc import Callable

from engine.parallel.meeting import LOOK_SECONDS


class GroupWatch:
    """A thread that aborts NCCL's communicator once the ranks cannot go on together.

    Its kernels wait for a lost rank until then, and the host waits for the step that they are part of. Waits for ranks
    of this host are left to their own limit: a rank that ended them would send on what it has not got, to ranks that
    may not know yet that the group is broken.
    """

    def __init__(self, tell: Callable[[], None], abort: Callable[[], None], broken: Callable[[], bool]) -> None:
        """tell: called first, so that no rank takes for good what this one makes from then on; abort: returns once no
        captured graph refers to the communicator, which may be much later.
        """
        self._tell = tell
        self._abort = abort
        self._broken = broken
        self._told = threading.Event()
        self._giving_up = threading.Event()
        threading.Thread(target=self._run, name="rail", daemon=True).start()

    def give_up(self) -> None:
        """Abort, if that has not begun. Returns when it has: `broken` is not asked after this."""
        self._told.set()
        self._giving_up.wait()

    def _run(self) -> None:
        while not self._told.wait(LOOK_SECONDS) and not self._broken():
            pass
        self._tell()
        self._giving_up.set()
        self._abort()

"""How much of the processor this process gets when it wants it."""

from pathlib import Path

# Nanoseconds that the process's first thread was on a core, and that it waited for one though it could run.
_SCHEDSTAT = Path("/proc/self/schedstat")


class ProcessorShare:
    """The first thread's time on a core, as a part of the time in which it could run: 1 on a machine of its own.

    Other processes on the cores and a container's CPU limit lower it; being idle does not.
    """

    def __init__(self, schedstat: Path = _SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._ran, self._waited = self._read()

    def measure(self) -> float:
        """The share since it was last measured; 1 where the system does not tell, or the thread did not run."""
        ran, waited = self._read()
        since_ran, since_waited = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        return since_ran / (since_ran + since_waited) if since_ran + since_waited else 1.0

    def _read(self) -> tuple[int, int]:
        try:
            ran, waited, _ = self._schedstat.read_text().split()
        except (OSError, ValueError):
            return 0, 0
        return int(ran), int(waited)

"""Measures how much of a core this process gets when it wants one."""

from pathlib import Path

# Nanoseconds that the process's first thread ran, and that it waited for a core although it could run.
_SCHEDSTAT = Path("/proc/self/schedstat")


class ProcessorShare:
    """The time that the first thread ran, as a fraction of the time in which it could run: 1 if nothing else competes.

    Other processes on the cores and a container's CPU limit lower it; being idle does not.
    """

    def __init__(self, schedstat: Path = _SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._ran, self._waited = self._read()

    def measure(self) -> float:
        """The share since the last call; 1 if the system does not tell, or if the thread did not run."""
        ran, waited = self._read()
        since_ran, since_waited = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        return since_ran / (since_ran + since_waited) if since_ran + since_waited else 1.0

    def _read(self) -> tuple[int, int]:
        try:
            ran, waited, _ = self._schedstat.read_text(encoding="utf-8").split()
        except (OSError, ValueError):
            return 0, 0
        return int(ran), int(waited)

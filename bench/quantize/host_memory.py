"""The peak of this process's anonymous memory, which has no pages of files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

EVERY_SECONDS = 0.01


class HostPeak:
    """Attributes:
    peak_bytes: the most memory so far, above that at the beginning.
    """

    def __init__(self) -> None:
        self._before = anonymous_bytes()
        self.peak_bytes = 0

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes() - self._before)


@contextmanager
def host_peak() -> Iterator[HostPeak]:
    """Measure the peak during the block, by a look every hundredth of a second."""
    peak, ended = HostPeak(), Event()

    def watch() -> None:
        while not ended.wait(EVERY_SECONDS):
            peak.look()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak.look()
        ended.set()
        thread.join()


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(kilobytes) * 1024

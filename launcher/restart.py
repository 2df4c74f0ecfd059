"""When to restart a process that ended: a pure policy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts after 0.5 s, doubled for each end in a row up to 30 s; a minute of being ready ends the row.

    Gives up after eight ends in a row, some 60 s and as many starts later. What has served before may do so again even
    if a start finds its configuration or checkpoint wrong: a file system may be away, or a GPU's memory taken.
    """

    first_delay_seconds: float = 0.5
    longest_delay_seconds: float = 30.0
    served_seconds: float = 60.0
    attempts: int = 8

    def ends_in_row(self, before: int, served_seconds: float) -> int:
        """The number of ends in a row, including this one after `served_seconds` of being ready."""
        return 1 if served_seconds >= self.served_seconds else before + 1

    def delay_seconds(self, ends_in_row: int) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        if ends_in_row >= self.attempts:
            return None
        delay_seconds: float = self.first_delay_seconds * 2 ** (ends_in_row - 1)
        return min(delay_seconds, self.longest_delay_seconds)

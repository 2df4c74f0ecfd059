"""What decode steps take, by their rows and their drafts."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a decode step by its rows and its drafts."""

    # Ascending numbers of rows.
    rows: Sequence[int]
    # For each of these numbers: the seconds with no drafts, with one draft a row, ...
    seconds: Sequence[Sequence[float]]

    def of(self, rows: int) -> Sequence[float]:
        """By depth, at the nearest measured number of rows that is no smaller; at the largest if all are smaller."""
        return self.seconds[min(bisect_left(self.rows, rows), len(self.rows) - 1)]

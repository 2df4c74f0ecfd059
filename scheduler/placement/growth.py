"""By how many tokens the answers on a rank will still grow, as far as a scheduler can tell. Pure."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec


class Times(msgspec.Struct, frozen=True, gc=False):
    """Times on the clock of `Candidates.now`, ascending, with the sums of the first 0, 1, 2, ... of them."""

    times: Sequence[float] = ()
    sums: Sequence[float] = (0.0,)

    @classmethod
    def of(cls, ascending: Iterable[float]) -> "Times":
        # Arrays, since the log of decisions keeps hundreds of thousands of times: 16 bytes for each, 40 in lists.
        times = list(ascending)
        return cls(array("d", times), array("d", [*accumulate(times, initial=0.0)]))

    def seconds_after(self, now: float) -> float:
        """By how much the later ones are after `now`, in sum."""
        first = bisect_right(self.times, now)
        return self.sums[-1] - self.sums[first] - (len(self.times) - first) * now


class PlacedAnswers(msgspec.Struct, frozen=True, gc=False):
    """When the answers that a scheduler placed on a rank begin, and when they end if each has the mean length."""

    begins: Times = Times()
    ends: Times = Times()

    def __len__(self) -> int:
        return len(self.ends.times)

    def tokens_left(self, now: float, token_seconds: float) -> float:
        """The tokens that they will still get, those that have not begun included.

        An answer that is longer than the mean already may end at any time, and counts as ending now.
        """
        return max(self.ends.seconds_after(now) - self.begins.seconds_after(now), 0.0) / token_seconds


NO_ANSWERS = PlacedAnswers()

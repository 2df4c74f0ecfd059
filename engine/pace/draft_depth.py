"""How many tokens to guess after each that is drawn: the depth that brings most tokens a second."""

from engine.drafts.config import MOST_DRAFTS
from engine.pace.step_times import StepTimes
from engine.protocol.messages import DraftCounts

# Assumed shares of rows whose first draft is right, whose first two drafts are right, ... until some were verified.
# They are optimistic, since a depth that is never tried is never measured.
PRIOR = tuple(0.8**place for place in range(1, 1 + MOST_DRAFTS))
# How many verified drafts weigh as much as the prior.
PRIOR_DRAFTS = 20.0
# Factor on what was measured for each later step. A depth that was given up is tried again once that is forgotten.
DECAY = 0.995


class DraftDepth:
    """Chooses each step's depth by how many requests decode, and by what became of the drafts before."""

    def __init__(self, most: int, times: StepTimes | None) -> None:
        """times: None if the depth is fixed, and always `most`."""
        self._most = most
        self._times = times
        # How many drafts were verified and accepted, by place, decayed.
        self._verified = [0.0] * MOST_DRAFTS
        self._accepted = [0.0] * MOST_DRAFTS

    def observe(self, counts: DraftCounts) -> None:
        """What became of one step's drafts."""
        for place in range(MOST_DRAFTS):
            self._verified[place] = self._verified[place] * DECAY + counts.verified[place]
            self._accepted[place] = self._accepted[place] * DECAY + counts.accepted[place]

    def choose(self, decoding: int) -> int:
        """The depth of a step in which `decoding` requests decode."""
        if self._times is None or not decoding:
            return self._most
        seconds = self._times.of(decoding)
        rates = []
        tokens = 1.0
        for depth in range(1 + self._most):
            tokens += self._share(depth - 1) if depth else 0.0
            rates.append(tokens / seconds[depth])
        return max(range(len(rates)), key=rates.__getitem__)

    def _share(self, place: int) -> float:
        """Expected share of rows whose drafts up to this place are right."""
        right = self._accepted[place] + PRIOR_DRAFTS * PRIOR[place]
        return right / (self._verified[place] + PRIOR_DRAFTS)

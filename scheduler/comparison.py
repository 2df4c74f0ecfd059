"""A request beside all that it may be placed on: what the best of that is, and what each of the others would mean."""

from functools import partial

import msgspec

from scheduler.admission import Objectives, admit, meets
from scheduler.candidates import Candidates, PlacementKnobs, PlacementRequest
from scheduler.placement import Choice, best, best_first, predict
from scheduler.terms import Terms


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """Plain data, so that it says the same whenever it is asked."""

    request: PlacementRequest
    candidates: Candidates
    knobs: PlacementKnobs
    objectives: Objectives

    def best(self) -> Choice:
        return best(self.request, self.candidates, self.knobs, partial(meets, self.objectives))

    def terms(self) -> list[Terms]:
        """Terms of all candidates, best first."""
        return best_first(admit(predict(self.request, self.candidates, self.knobs), self.objectives))

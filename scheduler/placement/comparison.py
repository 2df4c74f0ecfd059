"""One request and all that it may be placed on: finds the best placement, or the terms of all."""

from functools import partial

import msgspec

from scheduler.placement.admission import Objectives, admit, meets
from scheduler.placement.candidates import Candidates, PlacementKnobs, PlacementRequest
from scheduler.placement.choice import Choice, best, best_first, predict
from scheduler.placement.terms import Terms


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """Plain data, so its methods give the same answer at any time."""

    request: PlacementRequest
    candidates: Candidates
    knobs: PlacementKnobs
    objectives: Objectives

    def best(self) -> Choice:
        return best(self.request, self.candidates, self.knobs, partial(meets, self.objectives))

    def terms(self) -> list[Terms]:
        """Terms of all candidates, best first."""
        return best_first(admit(predict(self.request, self.candidates, self.knobs), self.objectives))

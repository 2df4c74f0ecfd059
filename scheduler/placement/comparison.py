"""One request and all that it may be placed on: finds the best placement, or the terms of all."""

from functools import partial

import msgspec

from scheduler.config import ObjectivesConfig
from scheduler.placement.admission import admit, meets
from scheduler.placement.candidates import Candidates, PlacementRequest
from scheduler.placement.choice import Choice, best, best_first, predict
from scheduler.placement.constants import Constants
from scheduler.placement.terms import Terms


class Comparison(msgspec.Struct, frozen=True, gc=False):
    """Plain data, so its methods give the same answer at any time."""

    request: PlacementRequest
    candidates: Candidates
    constants: Constants
    objectives: ObjectivesConfig

    def best(self) -> Choice:
        return best(self.request, self.candidates, self.constants, partial(meets, self.objectives))

    def terms(self) -> list[Terms]:
        """Terms of all candidates, best first."""
        return best_first(admit(predict(self.request, self.candidates, self.constants), self.objectives))

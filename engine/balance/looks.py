"""When the ranks of a worker look at which experts were chosen. Pure."""

import numpy as np
import numpy.typing as npt

# Steps before the first look, if the interval between two is longer: what a worker's first requests choose is most of
# what the next ones will, and the first of them should not wait for the experts of a whole interval.
FIRST_STEPS = 64
# How often each expert must have been chosen in the mean, before the first interval is over, for its load to say more
# than chance: loads of 16 are off by a quarter.
LEAST_CHOICES = 16


def next_look(steps: int, interval: int) -> int:
    """The step of the look after the one at `steps`, 0 before the first: soon at first, then every `interval` steps."""
    return min(2 * steps, steps + interval) if steps else min(FIRST_STEPS, interval)


def tells_enough(choices: npt.NDArray[np.int64], steps: int, interval: int) -> bool:
    """Whether experts may move by what was counted. choices: [layers, experts] since the last look that told enough."""
    return steps >= interval or bool((choices.mean(1) >= LEAST_CHOICES).all())

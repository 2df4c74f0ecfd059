"""What one step of training sees."""

from dataclasses import dataclass

import numpy as np

# Marks targets that are not to be learned.
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Documents packed one after the other, all of them whole, on the host."""

    # int16 [tokens] each.
    tokens: np.ndarray
    positions: np.ndarray
    # The next token, and the one after that, where they are to be learned; IGNORED elsewhere.
    targets: np.ndarray
    second_targets: np.ndarray
    # int32 [documents + 1] and the bound of their lengths, as in Layout.
    boundaries: np.ndarray
    longest: int

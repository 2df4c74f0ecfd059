"""The input of one step of training."""

from dataclasses import dataclass

import numpy as np

# Marks targets that the model does not learn.
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Documents packed one after the other, all of them whole, on the host."""

    # int16 [tokens] each.
    tokens: np.ndarray
    positions: np.ndarray
    # The next token, and the one after it, if they are to be learned; otherwise IGNORED.
    targets: np.ndarray
    second_targets: np.ndarray
    # int32 [documents + 1] and the bound of their lengths, as in Layout.
    boundaries: np.ndarray
    longest: int

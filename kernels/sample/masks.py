"""Tokens that a row may not draw."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.host_copy import to_device

_BITS = 1 << np.arange(8, dtype=np.uint8)


def forbid(logits: torch.Tensor, rows: Sequence[int], allowed: npt.NDArray[np.uint8]) -> None:
    """Set logits to minus infinity in place, except at the tokens that are allowed.

    logits: [any, vocabulary] float32; rows: those with masks, in order; allowed: [rows, at least vocabulary / 8], a bit
    a token, the lowest first. Reads and writes the rows once, and a byte for each of their tokens. Backend: the
    reference.
    """
    assert allowed.shape[0] == len(rows) and allowed.shape[1] * 8 >= logits.shape[1]
    packed = to_device(allowed, logits.device)
    forbidden = (packed[:, :, None] & to_device(_BITS, logits.device)) == 0
    forbidden = forbidden.view(len(rows), -1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    chosen = to_device(np.array(rows, np.int64), logits.device)
    logits[chosen] = logits[chosen].masked_fill(forbidden, -torch.inf)

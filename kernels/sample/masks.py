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
    forbidden = _unpacked(allowed, logits.shape[1], logits.device)
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    chosen = to_device(np.array(rows, np.int64), logits.device)
    logits[chosen] = logits[chosen].masked_fill(forbidden, -torch.inf)


def _unpacked(allowed: npt.NDArray[np.uint8], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Where the bit is not set: [rows, vocabulary] bool."""
    if device.type == "cpu":
        # On the host numpy takes a third of the time.
        bits = np.unpackbits(allowed, axis=1, count=vocabulary, bitorder="little")
        return torch.from_numpy(bits == 0)
    packed = to_device(allowed, device)
    forbidden = (packed[:, :, None] & to_device(_BITS, device)) == 0
    return forbidden.view(len(allowed), -1)[:, :vocabulary]

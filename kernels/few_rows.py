"""Which steps have a few rows, such as one request's: the latency of their kernels limits them, not the bytes.

Kernels that start early, read weights before they wait, and do what several others did, are faster then; with more rows
they lose what tensor cores and larger tiles bring. All of them are chosen by the same number of rows; some only compute
one.
"""

import torch

# With two rows a step of Moonlight takes as long by either kernels, with four a third longer by these.
MOST_ROWS = 1


def are_few(x: torch.Tensor) -> bool:
    """Whether kernels for a few rows are to compute these: [rows, ...]."""
    return 0 < x.shape[0] <= MOST_ROWS

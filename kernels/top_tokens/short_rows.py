"""The choice of the highest of a few thousand scores on Hopper, a CTA a query: `cuda/short_rows.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "short_rows.cu"
Arguments = structure(SOURCE, "Arguments")
THREADS = 512
# Scores that a thread has room for: a kernel each.
HELD = (8, 16)


MOST = THREADS * HELD[-1]


def takes(scores: torch.Tensor) -> bool:
    """Whether this kernel chooses: from rows that a CTA holds, on Hopper."""
    return scores.shape[1] <= MOST and is_hopper(scores.device)


def top_tokens(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
    out = torch.empty(len(scores), count, dtype=torch.int32, device=scores.device)
    if len(scores):
        choose(scores, seen, out)
    return out


def choose(scores: torch.Tensor, seen: torch.Tensor, out: torch.Tensor) -> None:
    """Fills the rows of `out` whose queries see no more than MOST tokens. Rows of `scores` may be longer."""
    (queries, width), count = scores.shape, out.shape[1]
    arguments = Arguments(scores=scores.data_ptr(), seen=seen.data_ptr(), out=out.data_ptr(), width=width, count=count)
    held = next((each for each in HELD if width <= THREADS * each), HELD[-1])
    kernel = load_kernel(SOURCE, f"choose_{held}", scores.device.index or 0)
    kernel.launch((queries, 1, 1), THREADS, arguments, dependent=True)

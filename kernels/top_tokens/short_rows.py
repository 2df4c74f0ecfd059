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


def takes(scores: torch.Tensor) -> bool:
    """Whether this kernel chooses: from rows that a CTA holds, on Hopper."""
    return scores.shape[1] <= THREADS * HELD[-1] and is_hopper(scores.device)


def top_tokens(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
    (queries, width), device = scores.shape, scores.device
    out = torch.empty(queries, count, dtype=torch.int32, device=device)
    if queries:
        arguments = Arguments(
            scores=scores.data_ptr(), seen=seen.data_ptr(), out=out.data_ptr(), width=width, count=count
        )
        held = next(each for each in HELD if width <= THREADS * each)
        kernel = load_kernel(SOURCE, f"choose_{held}", device.index or 0)
        kernel.launch((queries, 1, 1), THREADS, arguments, dependent=True)
    return out

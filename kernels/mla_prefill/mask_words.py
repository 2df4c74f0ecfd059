"""Masks of prompts on Hopper, a CTA a query: `cuda/mask_words.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "mask_words.cu"
Arguments = structure(SOURCE, "Arguments")
THREADS = 128


def takes(tokens: torch.Tensor) -> bool:
    return is_hopper(tokens.device)


def write_mask(tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """As `mask.write_mask`."""
    queries, count = tokens.shape
    if not queries:
        return
    arguments = Arguments(
        tokens=tokens.data_ptr(), mask=rows.data_ptr(), block_words=rows.stride(0), count=count, blocks=len(rows)
    )
    kernel = load_kernel(SOURCE, "write_mask", tokens.device.index or 0)
    kernel.launch((queries, 1, 1), THREADS, arguments, dependent=True)

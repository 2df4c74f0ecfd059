"""Products of few tokens on Hopper, with few outputs, in shares: `cuda/few_tokens.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "few_tokens.cu"
Arguments = structure(SOURCE, "Arguments")
# Numbers of tokens of a CTA's tile, and numbers of tiles: together as many CTAs as an H200 runs at once.
TOKENS, FEWEST_TILES, MOST_TILES = (16, 32, 48), 2, 4
MOST_TOKENS = MOST_TILES * max(TOKENS)
# As in the source: a CTA's outputs, inputs and threads; elements and bytes of a box's rows.
OUTPUTS, INPUTS, THREADS, ELEMENTS, LINE = 64, 1024, 256, 64, 128


def takes(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are few tokens and whole tiles of outputs, and the copy engine can read both. Both are bfloat16."""
    (tokens, inputs), outputs = hidden.shape, weight.shape[0]
    fits = tokens <= MOST_TOKENS and outputs % OUTPUTS == 0 and inputs % ELEMENTS == 0
    aligned = hidden.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return is_hopper() and fits and aligned and hidden.is_contiguous()


def multiply_in_shares(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `kernels.linear.multiply_in_shares`, of what it `takes`."""
    (tokens, inputs), outputs = hidden.shape, weight.shape[0]
    shares = -(-inputs // INPUTS)
    out = torch.empty(shares, tokens, outputs, dtype=torch.float32, device=hidden.device)
    if not tokens:
        return out
    tiles = max(FEWEST_TILES, -(-tokens // max(TOKENS)))
    held = next(held for held in TOKENS if held * tiles >= tokens)
    arguments = Arguments(
        weight=_boxes(weight.data_ptr(), outputs, inputs, OUTPUTS),
        hidden=_boxes(hidden.data_ptr(), tokens, inputs, held), out=out.data_ptr(), tokens=tokens, outputs=outputs,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"few_tokens_{held}", hidden.device.index or 0)
    grid = (outputs // OUTPUTS, shares, -(-tokens // held))
    kernel.launch(grid, THREADS, arguments, dependent=True)
    return out


def _boxes(address: int, rows: int, inputs: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows, 2 * inputs, box_rows, LINE)

"""Pieces of attended latents to values, joined on the way, for few tokens on Hopper: `cuda/pieces.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized, empty_quantized
from kernels.mla_decode.attended import Attended
from kernels.mla_decode.parts import Work
from kernels.mla_projections.few_tokens import THREADS, VALUE, ExpandArguments, expand_arguments, takes_values
from kernels.nvrtc import load_kernel

SOURCE = Path(__file__).parent / "cuda" / "pieces.cu"
# Numbers of tokens of a CTA's tile. With more tokens, joining reads much, and a kernel with more CTAs does it.
TOKENS = (16, 32)


class PiecesArguments(ctypes.Structure):
    """`PiecesArguments` of the source."""

    _fields_ = (
        ("expand", ExpandArguments),
        ("work", Work),
        # The tensor maps align the structure to 64 bytes.
        ("padding", ctypes.c_byte * 16),
    )


def takes(attended: Attended, weight: torch.Tensor) -> bool:
    """Whether there are pieces, of few tokens. weight: as in `expand_values`."""
    latents = attended.latents
    return attended.pieces is not None and latents.shape[0] <= max(TOKENS) and takes_values(latents, weight)


def expand_pieces(attended: Attended, weight: torch.Tensor) -> Quantized:
    """As `kernels.mla_projections.expand_attended`, for what it `takes`."""
    (tokens, heads, _), device = attended.latents.shape, attended.latents.device
    assert attended.pieces is not None
    out = empty_quantized(tokens, heads * VALUE, device=device)
    tile_tokens = next(size for size in TOKENS if size >= tokens)
    expand = expand_arguments(attended.latents, weight, out, tile_tokens)
    arguments = PiecesArguments(expand, attended.pieces.work)
    kernel = load_kernel(SOURCE, f"expand_pieces_{tile_tokens}", device.index or 0)
    kernel.launch((heads, 1, 1), THREADS, arguments, dependent=True)
    return out

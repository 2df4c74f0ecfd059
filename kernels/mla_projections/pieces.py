"""Pieces of attended latents to values, joined on the way, for few tokens on Hopper: `cuda/pieces.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.act_quant.quantized import QuantizedRows, cuda_macros
from kernels.mla_decode.attended import Attended
from kernels.mla_decode.parts import FEW_TOKENS
from kernels.mla_projections.few_tokens import THREADS, expand_arguments, takes_values
from kernels.nvrtc import load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "pieces.cu"
PiecesArguments = structure(SOURCE, "PiecesArguments")
# Tokens of a CTA's tile, as in the source.
TILE_TOKENS = 16


def takes(attended: Attended, weight: torch.Tensor) -> bool:
    """Whether there are pieces, of few tokens. weight: as in `expand_values`."""
    latents = attended.latents
    return attended.pieces is not None and latents.shape[0] <= FEW_TOKENS and takes_values(latents, weight)


def expand_pieces(attended: Attended, weight: torch.Tensor) -> torch.Tensor:
    """As `kernels.mla_projections.expand_values`, for what it `takes`."""
    latents = attended.latents
    out = latents.new_empty(*latents.shape[:2], weight.shape[2])
    _launch(attended, expand_arguments(latents, weight, out, TILE_TOKENS))
    return out


def expand_pieces_into(attended: Attended, weight: torch.Tensor, out: QuantizedRows) -> None:
    """As `kernels.mla_projections.expand_values_into`, for what it `takes`."""
    _launch(attended, expand_arguments(attended.latents, weight, out, TILE_TOKENS), cuda_macros(out.powers))


def _launch(attended: Attended, expand: ctypes.Structure, macros: tuple[str, ...] = ()) -> None:
    (tokens, heads, _), device = attended.latents.shape, attended.latents.device
    assert attended.pieces is not None and tokens <= FEW_TOKENS
    arguments = PiecesArguments(expand=expand, work=attended.pieces.work)
    kernel = load_kernel(SOURCE, "expand_pieces", device.index or 0, macros)
    kernel.launch((heads * expand.shares, 1, 1), THREADS, arguments, dependent=True)

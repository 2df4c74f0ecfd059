"""The products around absorbed attention for few tokens on Hopper, with what stands beside: `cuda/few_tokens.cu`."""

import ctypes
from pathlib import Path

import torch

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.hopper import is_hopper
from kernels.nvrtc import encode_rows, load_kernel

SOURCE = Path(__file__).parent / "cuda" / "few_tokens.cu"
# Widths of a head that the source is made for.
NOPE, ROPE, LATENT, VALUE = 128, 64, 512, GROUP
# Tokens that a CTA is made for.
TOKENS = (16, 32, 64, 96)
# Up to here it is faster than cuBLAS and what that needs beside it.
MOST_TOKENS = 128
# As in the source.
PARTS, THREADS, LINE = 2, 256, 128


class AbsorbArguments(ctypes.Structure):
    """`AbsorbArguments` of the source."""

    _fields_ = (
        ("weight", ctypes.c_uint64 * 16),
        ("query", ctypes.c_uint64 * 16),
        ("rope", ctypes.c_void_p),
        ("rotations", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("tokens", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("head_rows", ctypes.c_int),
        ("head_bytes", ctypes.c_int),
        ("token_words", ctypes.c_int),
        ("head_words", ctypes.c_int),
        # To a multiple of the maps' alignment, 64.
        ("padding", ctypes.c_byte * 16),
    )


class ExpandArguments(ctypes.Structure):
    """`ExpandArguments` of the source."""

    _fields_ = (
        ("weight", ctypes.c_uint64 * 16),
        ("attended", ctypes.c_uint64 * 16),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("tokens", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("head_rows", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        ("padding", ctypes.c_byte * 32),
    )


def takes_queries(query: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it takes what `absorb_query` is given."""
    widths = (weight.shape[1], query.shape[2] - weight.shape[1], weight.shape[2])
    return _is_served(query) and widths == (NOPE, ROPE, LATENT) and _lies_in_rows(weight)


def takes_values(attended: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it takes what `expand_values_quantized` is given."""
    return _is_served(attended) and weight.shape[1:] == (LATENT, VALUE) and _lies_in_rows(weight.transpose(1, 2))


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    (tokens, heads, _), device = query.shape, query.device
    out = query.new_empty(tokens, heads, LATENT + ROPE)
    if not tokens:
        return out
    held, tiles = cut(tokens)
    token_bytes, head_bytes = 2 * query.stride(0), 2 * query.stride(1)
    head_rows = weight.stride(0) // LATENT
    arguments = AbsorbArguments(
        _boxes(weight.data_ptr(), (heads - 1) * head_rows + NOPE, 2 * LATENT, NOPE),
        _boxes(query.data_ptr(), tokens, token_bytes, held),
        query.data_ptr() + 2 * NOPE, rotations.data_ptr(), out.data_ptr(), tokens, heads, head_rows, head_bytes,
        token_bytes // 4, head_bytes // 4,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"few_tokens_absorb_queries_{held}", device.index or 0)
    kernel.launch((PARTS, heads, tiles), THREADS, arguments, dependent=True)
    return out


def expand_values_quantized(attended: torch.Tensor, weight: torch.Tensor) -> Quantized:
    (tokens, heads, _), device = attended.shape, attended.device
    out = empty_quantized(tokens, heads * VALUE, device=device)
    if not tokens:
        return out
    held, tiles = cut(tokens)
    head_rows = weight.stride(0) // LATENT
    arguments = ExpandArguments(
        _boxes(weight.data_ptr(), (heads - 1) * head_rows + VALUE, 2 * LATENT, VALUE),
        _boxes(attended.data_ptr(), tokens, 2 * heads * LATENT, held),
        out.values.data_ptr(), out.scales.data_ptr(), tokens, heads, head_rows, out.scales.stride(1),
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"few_tokens_expand_values_{held}", device.index or 0)
    kernel.launch((heads, tiles, 1), THREADS, arguments, dependent=True)
    return out


def cut(tokens: int) -> tuple[int, int]:
    """Tokens that a CTA is made for, and how many of those it takes."""
    tiles = -(-tokens // max(TOKENS))
    return next(held for held in TOKENS if held * tiles >= tokens), tiles


def _is_served(x: torch.Tensor) -> bool:
    """Few tokens, which the copy engine can read."""
    aligned = x.data_ptr() % 16 == 0 and all(2 * stride % 16 == 0 for stride in x.stride()[:2])
    return is_hopper() and x.dtype == torch.bfloat16 and x.shape[0] <= MOST_TOKENS and aligned


def _lies_in_rows(weight: torch.Tensor) -> bool:
    """weight: [heads, rows, latent], each head's whole rows of a matrix."""
    return weight.stride(1) == LATENT and weight.stride(0) % LATENT == 0 and weight.data_ptr() % 16 == 0


def _boxes(address: int, rows: int, row_bytes: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows=rows, row_bytes=row_bytes, box_rows=box_rows, box_bytes=LINE)

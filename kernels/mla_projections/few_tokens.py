"""The products around absorbed attention for few tokens on Hopper, fused with rotation and quantization.

Source: `cuda/few_tokens.cu`.
"""

import ctypes
from pathlib import Path

import torch

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.hopper import is_hopper
from kernels.nvrtc import encode_rows, load_kernel

SOURCE = Path(__file__).parent / "cuda" / "few_tokens.cu"
# Widths of a head that the source supports.
NOPE, ROPE, LATENT, VALUE = 128, 64, 512, GROUP
# Numbers of tokens of a CTA's tile.
TOKENS = (16, 32, 64, 96)
# Up to this many tokens it is faster than cuBLAS with the kernels that cuBLAS needs around it.
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
        # The tensor maps align the structure to 64 bytes.
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
    tile_tokens, tiles = choose_tiles(tokens)
    token_bytes, head_bytes = 2 * query.stride(0), 2 * query.stride(1)
    head_rows = weight.stride(0) // LATENT
    arguments = AbsorbArguments(
        _boxes(weight.data_ptr(), (heads - 1) * head_rows + NOPE, 2 * LATENT, NOPE),
        _boxes(query.data_ptr(), tokens, token_bytes, tile_tokens),
        query.data_ptr() + 2 * NOPE, rotations.data_ptr(), out.data_ptr(), tokens, heads, head_rows, head_bytes,
        token_bytes // 4, head_bytes // 4,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"few_tokens_absorb_queries_{tile_tokens}", device.index or 0)
    kernel.launch((PARTS, heads, tiles), THREADS, arguments, dependent=True)
    return out


def expand_values_quantized(attended: torch.Tensor, weight: torch.Tensor) -> Quantized:
    (tokens, heads, _), device = attended.shape, attended.device
    out = empty_quantized(tokens, heads * VALUE, device=device)
    if not tokens:
        return out
    tile_tokens, tiles = choose_tiles(tokens)
    arguments = expand_arguments(attended, weight, out, tile_tokens)
    kernel = load_kernel(SOURCE, f"few_tokens_expand_values_{tile_tokens}", device.index or 0)
    kernel.launch((heads, tiles, 1), THREADS, arguments, dependent=True)
    return out


def expand_arguments(attended: torch.Tensor, weight: torch.Tensor, out: Quantized, tile_tokens: int) -> ExpandArguments:
    (tokens, heads, _), head_rows = attended.shape, weight.stride(0) // LATENT
    return ExpandArguments(
        _boxes(weight.data_ptr(), (heads - 1) * head_rows + VALUE, 2 * LATENT, VALUE),
        _boxes(attended.data_ptr(), tokens, 2 * heads * LATENT, tile_tokens),
        out.values.data_ptr(), out.scales.data_ptr(), tokens, heads, head_rows, out.scales.stride(1),
    )  # fmt: skip


def choose_tiles(tokens: int) -> tuple[int, int]:
    """The tokens of a tile, and the number of tiles."""
    tiles = -(-tokens // max(TOKENS))
    return next(size for size in TOKENS if size * tiles >= tokens), tiles


def _is_served(x: torch.Tensor) -> bool:
    """Whether there are few tokens and the copy engine can read them."""
    aligned = x.data_ptr() % 16 == 0 and all(2 * stride % 16 == 0 for stride in x.stride()[:2])
    return is_hopper() and x.dtype == torch.bfloat16 and x.shape[0] <= MOST_TOKENS and aligned


def _lies_in_rows(weight: torch.Tensor) -> bool:
    """Whether each head of the weight, [heads, rows, latent], has whole rows of a matrix."""
    return weight.stride(1) == LATENT and weight.stride(0) % LATENT == 0 and weight.data_ptr() % 16 == 0


def _boxes(address: int, rows: int, row_bytes: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows, row_bytes, box_rows, LINE)

"""The products around absorbed attention for few tokens on Hopper, fused with rotation and quantization.

Source: `cuda/few_tokens.cu`.
"""

import ctypes
from pathlib import Path

import torch

from kernels.act_quant.quantized import GROUP, QuantizedRows, cuda_macros
from kernels.hopper import is_hopper
from kernels.mla_decode import FEW_HEADS
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "few_tokens.cu"
AbsorbArguments = structure(SOURCE, "AbsorbArguments")
LatentArguments = structure(SOURCE, "LatentArguments")
ExpandArguments = structure(SOURCE, "ExpandArguments")
# Widths of a head that the source supports, of queries' part that is not rotated any of these; values are whole groups.
NOPES, ROPE, LATENT = (128, 192), 64, 512
# Numbers of tokens of a CTA's tile. The last one is for many heads: fewer would leave multiprocessors without a tile.
TOKENS, MANY_HEADS = (16, 32, 64, 96, 128), 128
# Up to this many tokens it is faster than cuBLAS with the kernels that cuBLAS needs around it, with many heads and with
# others. These, and queries of 192 channels, were not measured above.
MOST_TOKENS, MOST_TOKENS_OF_OTHERS, MOST_TOKENS_OF_WIDE_HEADS = 192, 128, 32
# The same of values in bfloat16, and the most tokens of a tile: so 16 or 20 heads have enough CTAs.
MOST_TOKENS_OF_PLAIN_VALUES, MOST_TOKENS_OF_PLAIN_TILE = 64, 32
# As in the source.
THREADS, LINE = 256, 128
# Parts of the latent that a head's CTAs compute, and their threads; with few heads and tokens the second.
PARTS, NARROW_PARTS, MOST_TOKENS_OF_NARROW = (2, 256), (8, 128), 32


def takes_queries(query: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it takes what `absorb_query` is given."""
    nope, latent = weight.shape[1:]
    widths = nope in NOPES and (query.shape[2] - nope, latent) == (ROPE, LATENT)
    return _is_served(query, _are_many(query.shape[1], nope)) and widths and _lies_in_rows(weight)


def takes_values(attended: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it takes what `expand_values_into` is given."""
    # Wider heads only for few rows: of more, cuBLAS reads the attended latents once.
    value, narrow = weight.shape[2], attended.shape[0] <= MOST_TOKENS_OF_WIDE_HEADS
    widths = weight.shape[1] == LATENT and (value == GROUP or (value % GROUP == 0 and narrow))
    return _is_served(attended, _are_many(attended.shape[1])) and widths and _lies_in_rows(weight.transpose(1, 2))


def takes_plain_values(attended: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it takes what `expand_values` is given."""
    few = attended.shape[0] <= MOST_TOKENS_OF_PLAIN_VALUES
    widths = weight.shape[1] == LATENT and weight.shape[2] % GROUP == 0
    return few and widths and _is_served(attended, many=False) and _lies_in_rows(weight.transpose(1, 2))


def takes_latents(latents: torch.Tensor, latent_weight: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether it takes these of `write_and_absorb` too. With more tokens that was not measured."""
    few = len(latents) <= MOST_TOKENS_OF_NARROW
    widths = latents.shape[1] == LATENT + ROPE and latent_weight.dtype == latents.dtype == torch.bfloat16
    aligned = latents.data_ptr() % 16 == 0 and 2 * latents.stride(0) % 16 == 0 and pool.data_ptr() % 16 == 0
    return few and widths and aligned


def write_and_absorb(
    query: torch.Tensor,
    latents: torch.Tensor,
    weight: torch.Tensor,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `kernels.mla_projections.write_and_absorb`."""
    written = LatentArguments(
        latents=latents.data_ptr(), weight=latent_weight.data_ptr(), slots=slots.data_ptr(), pool=pool.data_ptr(),
        row_bytes=2 * latents.stride(0), compresses=pool.dtype != latents.dtype, epsilon=epsilon, scale=scale,
    )  # fmt: skip
    return _absorb(query, weight, rotations, written)


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    return _absorb(query, weight, rotations, None)


def _absorb(
    query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor, written: ctypes.Structure | None
) -> torch.Tensor:
    (tokens, heads, _), nope, device = query.shape, weight.shape[1], query.device
    out = query.new_empty(tokens, heads, LATENT + ROPE)
    if not tokens:
        return out
    tile_tokens, tiles = choose_tiles(tokens, many=_are_many(heads, nope))
    token_bytes, head_bytes = 2 * query.stride(0), 2 * query.stride(1)
    head_rows = weight.stride(0) // LATENT
    arguments = AbsorbArguments(
        weight=_boxes(weight.data_ptr(), (heads - 1) * head_rows + nope, 2 * LATENT, nope),
        query=_boxes(query.data_ptr(), tokens, token_bytes, tile_tokens), rope=query.data_ptr() + 2 * nope,
        rotations=rotations.data_ptr(), out=out.data_ptr(), tokens=tokens, heads=heads, head_rows=head_rows,
        head_bytes=head_bytes, token_words=token_bytes // 4, head_words=head_bytes // 4,
    )  # fmt: skip
    if written is not None:
        arguments.written = written
    narrow = heads <= FEW_HEADS and tokens <= MOST_TOKENS_OF_NARROW
    parts, threads = NARROW_PARTS if narrow else PARTS
    name = f"few_tokens_absorb_queries_{nope}_{tile_tokens}_in_{parts}"
    kernel = load_kernel(SOURCE, name, device.index or 0)
    kernel.launch((parts, heads + (written is not None), tiles), threads, arguments, dependent=True)
    return out


def expand_values(attended: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (tokens, heads, _), device = attended.shape, attended.device
    out = attended.new_empty(tokens, heads, weight.shape[2])
    if tokens:
        tile_tokens = min(choose_tiles(tokens, many=False)[0], MOST_TOKENS_OF_PLAIN_TILE)
        arguments = expand_arguments(attended, weight, out, tile_tokens)
        kernel = load_kernel(SOURCE, f"few_tokens_expand_values_{tile_tokens}", device.index or 0)
        kernel.launch((heads * arguments.shares, -(-tokens // tile_tokens), 1), THREADS, arguments, dependent=True)
    return out


def expand_values_into(attended: torch.Tensor, weight: torch.Tensor, out: QuantizedRows) -> None:
    (tokens, heads, _), device = attended.shape, attended.device
    if not tokens:
        return
    tile_tokens, tiles = choose_tiles(tokens, many=_are_many(heads))
    arguments = expand_arguments(attended, weight, out, tile_tokens)
    name = f"few_tokens_expand_values_{tile_tokens}"
    kernel = load_kernel(SOURCE, name, device.index or 0, cuda_macros(out.powers))
    kernel.launch((heads * arguments.shares, tiles, 1), THREADS, arguments, dependent=True)


def expand_arguments(
    attended: torch.Tensor, weight: torch.Tensor, out: QuantizedRows | torch.Tensor, tile_tokens: int
) -> ctypes.Structure:
    """out: quantized, whole rows, or [tokens, heads, value] of bfloat16."""
    (tokens, heads, _), head_rows = attended.shape, weight.stride(0) // LATENT
    arguments = ExpandArguments(
        weight=_boxes(weight.data_ptr(), (heads - 1) * head_rows + weight.shape[2], 2 * LATENT, GROUP),
        attended=_boxes(attended.data_ptr(), tokens, 2 * heads * LATENT, tile_tokens),
        tokens=tokens, heads=heads, shares=weight.shape[2] // GROUP, head_rows=head_rows,
    )  # fmt: skip
    if isinstance(out, torch.Tensor):
        arguments.plain = out.data_ptr()
    else:
        arguments.values, arguments.scales = out.values.data_ptr(), out.scales.data_ptr()
        arguments.scale_stride = out.scales.stride(1)
    return arguments


def choose_tiles(tokens: int, *, many: bool) -> tuple[int, int]:
    """The tokens of a tile, and the number of tiles. many: whether there are many heads."""
    sizes = TOKENS if many else TOKENS[:-1]
    tiles = -(-tokens // max(sizes))
    return next(size for size in sizes if size * tiles >= tokens), tiles


def _are_many(heads: int, nope: int = min(NOPES)) -> bool:
    return heads >= MANY_HEADS and nope == min(NOPES)


def _is_served(x: torch.Tensor, many: bool) -> bool:
    """Whether there are few tokens and the copy engine can read them."""
    aligned = x.data_ptr() % 16 == 0 and all(2 * stride % 16 == 0 for stride in x.stride()[:2])
    most = MOST_TOKENS if many else MOST_TOKENS_OF_OTHERS
    return is_hopper() and x.dtype == torch.bfloat16 and x.shape[0] <= most and aligned


def _lies_in_rows(weight: torch.Tensor) -> bool:
    """Whether each head of the weight, [heads, rows, latent], has whole rows of a matrix."""
    return weight.stride(1) == LATENT and weight.stride(0) % LATENT == 0 and weight.data_ptr() % 16 == 0


def _boxes(address: int, rows: int, row_bytes: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows, row_bytes, box_rows, LINE)

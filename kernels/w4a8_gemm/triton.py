"""Packs INT4 experts into the order in which a warpgroup's threads take them, in Triton."""

import torch
import triton
import triton.language as tl

from kernels.w4a8_gemm.operands import TILE_INPUTS, WEIGHT_BYTES, group_of

# Published tiles are copied before they are packed in place: as many experts at once as this holds.
COPY_BYTES = 64 << 20
WORDS = tl.constexpr(WEIGHT_BYTES // 4)
# Words of 4 inputs of two outputs each, by their first input's place in a row of the tile.
ROW_PLACES = tl.constexpr(TILE_INPUTS // 4)


@triton.jit
def _spread(published):
    """Four signed weights of 4 bits to the lowest bits of four bytes."""
    halves = published.to(tl.int32) & 0xFFFF
    halves = (halves | (halves << 8)) & 0x00FF00FF
    return (halves | (halves << 4)) & 0x0F0F0F0F


@triton.jit
def _sign(nibbles):
    return (nibbles >> 3) & 0x01010101


@triton.jit
def _magnitude(nibbles, sign):
    """Three bits in each byte: that of -8 is 0."""
    return (((nibbles & 0x07070707) ^ (sign * 7)) + sign) & 0x07070707


# A program packs one tile, a word of two outputs' weights a thread at a time. Reads and writes 4,224 bytes, with groups
# of 32 inputs 4,608, once each: memory limits it.
@triton.jit(do_not_specialize=["row_tiles", "groups"])
def _pack(
    published, tiles, least, row_tiles, groups, TURNS: tl.constexpr, SCALES: tl.constexpr, TILE_WORDS: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    group, row_tile, expert = tile % groups, tile // groups % row_tiles, tile // groups // row_tiles
    first_tile = expert * row_tiles * groups + group
    # Parts of a word's number: load, warp, thread / 4, thread % 4, product, half (see `operands.INPUT_SPLIT`).
    word = tl.arange(0, WORDS)
    output = (word >> 7 & 3) * 16 + (word >> 4 & 7)
    place = (word >> 9) * 16 + (word >> 1 & 1) * 8 + (word & 1) * 4 + (word >> 2 & 3)
    first, second = _rows(row_tile, row_tiles, output, TURNS)
    nibbles = _spread(tl.load(published + _row(first_tile, groups, first, TILE_WORDS) + place))
    others = _spread(tl.load(published + _row(first_tile, groups, second, TILE_WORDS) + place))
    sign, other_sign = _sign(nibbles), _sign(others)
    magnitude, other_magnitude = _magnitude(nibbles, sign), _magnitude(others, other_sign)
    # The second output's sign goes to the byte after that of its magnitude.
    turned = (other_sign << 8) | (other_sign >> 24)
    packed = (sign << 7) | (other_magnitude << 4) | (turned << 3) | magnitude
    tl.store(tiles + tile * TILE_WORDS + word, packed)
    zero = magnitude | other_magnitude << 4
    zero |= zero >> 1 | zero >> 2
    if tl.max((sign & ~zero) | (other_sign & ~(zero >> 4)), axis=0) != 0:
        tl.store(least, 1)
    # A word of scales: of a group of inputs, and of two outputs.
    scale = tl.arange(0, 32 * SCALES)
    pair, number = scale // SCALES, scale % SCALES
    first, second = _rows(row_tile, row_tiles, (pair // 8) * 16 + pair % 8, TURNS)
    low = tl.load(published + _scales(first_tile, groups, first, SCALES, TILE_WORDS) + number).to(tl.int32)
    high = tl.load(published + _scales(first_tile, groups, second, SCALES, TILE_WORDS) + number).to(tl.int32)
    tl.store(tiles + tile * TILE_WORDS + WORDS + scale, (high << 16) | (low & 0xFFFF))


@triton.jit
def _rows(row_tile, row_tiles, output, TURNS: tl.constexpr):
    """The matrix's rows of a tile's output, and of the one 8 after it. If gate's and up's outputs take turns of 8, the
    second is up's row of the first one's.
    """
    if TURNS:
        first = row_tile * 32 + (output // 16) * 8 + output % 8
        second = first + row_tiles * 32
    else:
        first = row_tile * 64 + output
        second = first + 8
    return first, second


@triton.jit
def _row(first_tile, groups, row, TILE_WORDS: tl.constexpr):
    """Where a row's weights begin in the tile that has it, in two bytes each."""
    return (first_tile + row // 64 * groups) * (2 * TILE_WORDS) + row % 64 * ROW_PLACES


@triton.jit
def _scales(first_tile, groups, row, SCALES: tl.constexpr, TILE_WORDS: tl.constexpr):
    return (first_tile + row // 64 * groups) * (2 * TILE_WORDS) + 2 * WORDS + row % 64 * SCALES


def pack_published(tiles: torch.Tensor, in_turns: bool) -> bool:
    _, row_tiles, groups, size = tiles.shape
    least = torch.zeros(1, dtype=torch.int32, device=tiles.device)
    scales = TILE_INPUTS // group_of(tiles)
    for part in tiles.split(max(COPY_BYTES // max(tiles[0].numel(), 1), 1)):
        published = part.clone().view(torch.int16)
        _pack[(len(part) * row_tiles * groups,)](
            published, part.view(torch.int32), least, row_tiles, groups, in_turns, scales, size // 4, num_warps=4
        )
    return bool(least)
